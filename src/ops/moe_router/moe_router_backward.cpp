#include <cmath>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/common/values.h"
#include "ops/gemm/gemm.h"
#include "ops/moe_router/moe_router.h"

namespace m3 {
namespace {

// dr_TE: gradient of the logits.
void logit_gradients(const Tensor& scores_TE, const Tensor& ids_TK, const Tensor& weights_TK,
                     const Tensor& dweights_TK, const Tensor& dscores_TE, float* dr_TE) {
  const int64_t E = scores_TE.dim(1), K = ids_TK.dim(1);
  const float *scores = scores_TE.ptr<float>(), *weights = weights_TK.ptr<float>(),
              *dw = dweights_TK.ptr<float>();
  const float* extra = dscores_TE.defined() ? dscores_TE.ptr<float>() : nullptr;
  const int32_t* ids = ids_TK.ptr<int32_t>();
  parallel_rows(scores_TE.dim(0), E + 8 * K, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* dr = dr_TE + t * E;
      for (int64_t e = 0; e < E; ++e) dr[e] = extra != nullptr ? extra[t * E + e] : 0.0f;
      float sum = 0, mean = 0;
      for (int64_t j = t * K; j < (t + 1) * K; ++j) {
        sum += scores[t * E + ids[j]];
        mean += dw[j] * weights[j];
      }
      // All chosen scores 0 in fp32: the weights are constants.
      for (int64_t j = t * K; j < (t + 1) * K && sum > 0; ++j) dr[ids[j]] += (dw[j] - mean) / sum;
      for (int64_t e = 0; e < E; ++e) dr[e] *= scores[t * E + e] * (1.0f - scores[t * E + e]);
    }
  });
}

}  // namespace

void moe_router_backward(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& scores_TE,
                         const Tensor& ids_TK, const Tensor& weights_TK, const Tensor& dweights_TK,
                         const Tensor& dscores_TE, const Tensor& dh_TC, const Tensor& dgate_EC,
                         Arena& scratch, Stream) {
  M3_CHECK(h_TC.rank() == 2 && gate_EC.rank() == 2 && ids_TK.rank() == 2,
           "h_TC, gate_EC and ids_TK must have two axes, got {}, {} and {}", h_TC.shape().str(),
           gate_EC.shape().str(), ids_TK.shape().str());
  const int64_t T = h_TC.dim(0), E = gate_EC.dim(0), K = ids_TK.dim(1);
  check_shape("scores_TE", scores_TE, {T, E});
  check_shape("ids_TK", ids_TK, {T, K});
  check_shape("weights_TK", weights_TK, {T, K});
  check_shape("dweights_TK", dweights_TK, {T, K});
  if (dscores_TE.defined()) check_shape("dscores_TE", dscores_TE, {T, E});
  const ArenaScope scope(scratch);
  const Tensor dr_TE = scratch.alloc("router logit gradients", DType::kF32, {T, E});
  logit_gradients(scores_TE, ids_TK, weights_TK, dweights_TK, dscores_TE, dr_TE.ptr<float>());
  gemm_backward_x(dr_TE, gate_EC, dh_TC, {.accumulate = true}, scratch);
  gemm_backward_w(dr_TE, h_TC, dgate_EC, {}, {.accumulate = true}, scratch);
}

int64_t moe_router_backward_scratch_bytes(int64_t num_tokens, int64_t num_experts) {
  return num_tokens * num_experts * 4 + Arena::kAlignment;
}

void moe_router_backward_ref(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& scores_TE,
                             const Tensor& ids_TK, const Tensor& weights_TK,
                             const Tensor& dweights_TK, const Tensor& dscores_TE,
                             const Tensor& dh_TC, const Tensor& dgate_EC) {
  const int64_t C = h_TC.dim(1), E = gate_EC.dim(0), K = ids_TK.dim(1);
  const int32_t* ids = ids_TK.ptr<int32_t>();
  for (int64_t t = 0; t < h_TC.dim(0); ++t) {
    std::vector<double> ds(E);
    double sum = 0, mean = 0;
    for (int64_t e = 0; e < E && dscores_TE.defined(); ++e) ds[e] = value_at(dscores_TE, t * E + e);
    for (int64_t j = t * K; j < (t + 1) * K; ++j) {
      sum += value_at(scores_TE, t * E + ids[j]);
      mean += value_at(dweights_TK, j) * value_at(weights_TK, j);
    }
    for (int64_t j = t * K; j < (t + 1) * K; ++j)
      ds[ids[j]] += (value_at(dweights_TK, j) - mean) / sum;
    for (int64_t e = 0; e < E; ++e) {
      const double s = value_at(scores_TE, t * E + e), dr = ds[e] * s * (1 - s);
      for (int64_t c = 0; c < C; ++c) {
        set_value(dh_TC, t * C + c, value_at(dh_TC, t * C + c) + dr * value_at(gate_EC, e * C + c));
        set_value(dgate_EC, e * C + c,
                  value_at(dgate_EC, e * C + c) + dr * value_at(h_TC, t * C + c));
      }
    }
  }
}

void moe_count(const Tensor& ids_TK, const Tensor& counts_E) {
  int64_t* counts = counts_E.ptr<int64_t>();
  for (int64_t s = 0; s < ids_TK.numel(); ++s) {
    const int32_t id = ids_TK.ptr<int32_t>()[s];
    M3_CHECK(0 <= id && id < counts_E.numel(), "ids_TK[{}] is {}, want 0 to {}", s, id,
             counts_E.numel() - 1);
    ++counts[id];
  }
}

void moe_balance_step(const Tensor& counts_E, float step, const Tensor& bias_E) {
  const int64_t E = counts_E.numel();
  check_shape("bias_E", bias_E, counts_E.shape());
  const int64_t* counts = counts_E.ptr<int64_t>();
  float* bias = bias_E.ptr<float>();
  int64_t total = 0;
  for (int64_t e = 0; e < E; ++e) total += counts[e];
  for (int64_t e = 0; e < E; ++e) {  // mean − count, times E: exact in integers
    const int64_t gap = total - counts[e] * E;
    if (gap != 0) bias[e] += gap > 0 ? step : -step;
  }
}

double moe_balance_loss(const Tensor& scores_TE, const Tensor& ids_TK,
                        std::span<const int32_t> cu_documents, float factor,
                        const Tensor& dscores_TE) {
  M3_CHECK(scores_TE.rank() == 2 && ids_TK.rank() == 2 && ids_TK.dim(0) == scores_TE.dim(0),
           "scores_TE {} and ids_TK {} must have the same tokens", scores_TE.shape().str(),
           ids_TK.shape().str());
  const int64_t T = scores_TE.dim(0), E = scores_TE.dim(1), K = ids_TK.dim(1);
  check_shape("dscores_TE", dscores_TE, scores_TE.shape());
  M3_CHECK(!cu_documents.empty() && cu_documents.front() == 0 && cu_documents.back() == T,
           "cu_documents must go from 0 to {} tokens", T);
  const float* scores = scores_TE.ptr<float>();
  const int32_t* ids = ids_TK.ptr<int32_t>();
  float* dscores = dscores_TE.ptr<float>();
  double total = 0;
  for (size_t d = 0; d + 1 < cu_documents.size(); ++d) {
    const int64_t begin = cu_documents[d], end = cu_documents[d + 1];
    if (begin == end) continue;
    std::vector<double> f(E);
    for (int64_t s = begin * K; s < end * K; ++s) {
      f[ids[s]] += static_cast<double>(E) / static_cast<double>(K * (end - begin));
    }
    for (int64_t t = begin; t < end; ++t) {
      double sum = 0, weighted = 0;
      for (int64_t e = 0; e < E; ++e) {
        sum += scores[t * E + e];
        weighted += f[e] * scores[t * E + e];
      }
      if (sum == 0) continue;  // no score left in fp32: no share, no gradient
      total += weighted / sum;
      for (int64_t e = 0; e < E; ++e) {
        dscores[t * E + e] += static_cast<float>(factor * (f[e] - weighted / sum) / sum);
      }
    }
  }
  return total;
}

}  // namespace m3
