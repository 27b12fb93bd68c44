#include <cmath>
#include <limits>
#include <vector>

#include "ops/attend/attend.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_support.h"
#include "ops/common/values.h"

namespace m3 {
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
        const auto positions = msa_visible_positions(g, batch, support, lists, t, p, r);
        std::vector<double> query(D), row(D), weight;
        for (int c = 0; c < D; ++c) query[c] = load_element(q_THD.data(), q_THD.dtype(), (t * H + h) * D + c);
        double maximum = -std::numeric_limits<double>::infinity();
        for (int64_t j : positions) {
          load_row(keys.row(n, j, r), k.dtype(), D, row.data());
          double dot = 0;
          for (int c = 0; c < D; ++c) dot += query[c] * row[c];
          weight.push_back(scale * dot);
          maximum = std::max(maximum, weight.back());
        }
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - maximum);
        std::vector<double> out(D, 0.0);
        for (size_t s = 0; s < positions.size(); ++s) {
          load_row(values.row(n, positions[s], r), v.dtype(), D, row.data());
          for (int c = 0; c < D; ++c) out[c] += weight[s] / sum * row[c];
        }
        for (int c = 0; c < D; ++c) set_value(o_THD, (t * H + h) * D + c, out[c]);
        if (lse_TH.defined()) lse_TH.ptr<float>()[t * H + h] = static_cast<float>(maximum + std::log(sum));
      }
    }
  }
}

}  // namespace m3
