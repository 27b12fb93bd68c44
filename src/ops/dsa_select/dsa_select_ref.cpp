#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/common/msa_keys.h"
#include "ops/dsa_select/dsa_select.h"

namespace m3 {

void dsa_select_ref(const DsaGeometry& g, const MsaBatch& batch, const Tensor& qx_TAX, const Tensor& kx,
                    const Tensor& w_TA, const Tensor& tokens_TK) {
  g.check();
  batch.check(g.block);
  const MsaKeys keys("kx", batch, kx, g.block, 0, g.index_dim);
  const int A = g.heads, X = g.index_dim;
  const double factor = 1.0 / std::sqrt(double(A) * X);
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t i = 0; i < batch.q_len(n); ++i) {
      const int64_t t = batch.q_begin(n) + i, p = batch.first_position(n) + i;
      std::vector<double> score(p + 1);
      std::vector<int32_t> order(p + 1);
      for (int64_t j = 0; j <= p; ++j) {
        const void* key = keys.row(n, j, 0);
        double sum = 0;
        for (int a = 0; a < A; ++a) {
          double dot = 0;
          for (int c = 0; c < X; ++c) {
            dot += load_element(qx_TAX.data(), qx_TAX.dtype(), (t * A + a) * X + c) * load_element(key, keys.dtype(), c);
          }
          sum += w_TA.ptr<float>()[t * A + a] * (dot < 0 ? 0.0 : dot);  // a NaN stays one
        }
        score[j] = std::isnan(sum) ? -std::numeric_limits<double>::infinity() : sum * factor;
        order[j] = static_cast<int32_t>(j);
      }
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return score[a] > score[b]; });
      order.resize(std::min<int64_t>(g.budget, p + 1));
      std::sort(order.begin(), order.end());
      order.resize(g.budget, -1);
      std::copy(order.begin(), order.end(), tokens_TK.ptr<int32_t>() + t * g.budget);
    }
  }
}

}  // namespace m3
