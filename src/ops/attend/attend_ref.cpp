#include <cmath>
#include <limits>
#include <vector>

#include "ops/attend/attend.h"
#include "ops/common/msa_keys.h"

namespace m3 {
namespace {

// The positions that query row i of sequence n (position p) sees in group r.
std::vector<int64_t> visible_positions(const MsaGeometry& g, const MsaBatch& batch, const AttendSupport& support,
                                       const Tensor& lists, int64_t t, int64_t p, int r) {
  std::vector<int64_t> positions;
  switch (support.kind) {
    case AttendSupport::Kind::kBlocks: {
      const int32_t* ids = lists.ptr<int32_t>() + (r * batch.num_queries + t) * g.topk;
      for (int s = 0; s < g.topk && ids[s] >= 0; ++s) {
        for (int64_t j = int64_t{ids[s]} * g.block; j < (ids[s] + int64_t{1}) * g.block && j <= p; ++j) {
          positions.push_back(j);
        }
      }
      break;
    }
    case AttendSupport::Kind::kFull:
      for (int64_t j = 0; j <= p; ++j) positions.push_back(j);
      break;
    case AttendSupport::Kind::kWindow:
      for (int64_t j = 0; j <= p; ++j) {
        if (p - j < support.window || j < support.sink) positions.push_back(j);
      }
      break;
    case AttendSupport::Kind::kTokens: {
      const int32_t* tokens = lists.ptr<int32_t>() + t * support.budget;
      for (int64_t s = 0; s < support.budget && tokens[s] >= 0; ++s) positions.push_back(tokens[s]);
      break;
    }
  }
  return positions;
}

void store(const Tensor& tensor, int64_t index, double value) {
  if (tensor.dtype() == DType::kBF16) {
    tensor.ptr<bf16>()[index] = bf16(static_cast<float>(value));
  } else {
    tensor.ptr<float>()[index] = static_cast<float>(value);
  }
}

}  // namespace

void attend_ref(const MsaGeometry& g, const MsaBatch& batch, const AttendSupport& support, const Tensor& q_THD,
                const Tensor& k, const Tensor& v, const Tensor& lists, const Tensor& o_THD, const Tensor& lse_TH) {
  g.check();
  batch.check(g.block);
  const MsaKeys keys("k", batch, k, g.block, g.groups, g.head_dim), values("v", batch, v, g.block, g.groups, g.head_dim);
  const int D = g.head_dim, H = g.heads();
  const double scale = g.logit_scale();
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t i = 0; i < batch.q_len(n); ++i) {
      const int64_t t = batch.q_begin(n) + i, p = batch.first_position(n) + i;
      for (int h = 0; h < H; ++h) {
        const int r = h / g.heads_per_group;
        const auto positions = p < 0 ? std::vector<int64_t>{} : visible_positions(g, batch, support, lists, t, p, r);
        std::vector<double> weight;
        double maximum = -std::numeric_limits<double>::infinity();
        for (int64_t j : positions) {
          const void* key = keys.row(n, j, r);
          double dot = 0;
          for (int c = 0; c < D; ++c) {
            dot += load_element(q_THD.data(), q_THD.dtype(), (t * H + h) * D + c) * load_element(key, k.dtype(), c);
          }
          weight.push_back(scale * dot);
          maximum = std::max(maximum, weight.back());
        }
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - maximum);
        std::vector<double> out(D, 0.0);
        for (size_t s = 0; s < positions.size(); ++s) {
          const void* value = values.row(n, positions[s], r);
          for (int c = 0; c < D; ++c) out[c] += weight[s] / sum * load_element(value, v.dtype(), c);
        }
        for (int c = 0; c < D; ++c) store(o_THD, (t * H + h) * D + c, out[c]);
        if (lse_TH.defined()) lse_TH.ptr<float>()[t * H + h] = static_cast<float>(maximum + std::log(sum));
      }
    }
  }
}

}  // namespace m3
