// fp64 but for the scores, which are rounded to fp32 before the choice, so that ties are the same.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/common/values.h"
#include "ops/moe_router/moe_router.h"

namespace m3 {

void moe_router_ref(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& bias_E,
                    const Tensor& scores_TE, const Tensor& ids_TK, const Tensor& weights_TK) {
  const int64_t C = h_TC.dim(1), E = gate_EC.dim(0), K = ids_TK.dim(1);
  for (int64_t t = 0; t < h_TC.dim(0); ++t) {
    for (int64_t e = 0; e < E; ++e) {
      double logit = 0;
      for (int64_t c = 0; c < C; ++c)
        logit += value_at(h_TC, t * C + c) * value_at(gate_EC, e * C + c);
      set_value(scores_TE, t * E + e, 1 / (1 + std::exp(-logit)));
    }
    const auto score = [&](int32_t e) { return value_at(scores_TE, t * E + e); };
    std::vector<int32_t> order(E);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return static_cast<float>(score(a) + value_at(bias_E, a)) >
             static_cast<float>(score(b) + value_at(bias_E, b));
    });
    std::sort(order.begin(), order.begin() + K);
    double sum = 0;
    for (int64_t j = 0; j < K; ++j) sum += score(order[j]);
    for (int64_t j = 0; j < K; ++j) {
      ids_TK.ptr<int32_t>()[t * K + j] = order[j];
      set_value(weights_TK, t * K + j, score(order[j]) / sum);
    }
  }
}

}  // namespace m3
