#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/common/values.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace m3 {

void linear_cross_entropy_ref(const Tensor& h_NC, const Tensor& w_VC, const Tensor& targets_N,
                              const LinearCrossEntropy& config, const Tensor& loss_N,
                              const Tensor& logz_N, const Tensor& dh_NC, const Tensor& dw_VC) {
  const int64_t C = h_NC.dim(1), V = config.num_ids > 0 ? config.num_ids : w_VC.dim(0);
  for (int64_t n = 0; n < h_NC.dim(0); ++n) {
    std::vector<double> z(V), dh(C);
    double highest = -INFINITY, sum = 0;
    for (int64_t v = 0; v < V; ++v) {
      for (int64_t c = 0; c < C; ++c) z[v] += value_at(h_NC, n * C + c) * value_at(w_VC, v * C + c);
      highest = std::max(highest, z[v]);
    }
    for (int64_t v = 0; v < V; ++v) sum += std::exp(z[v] - highest);
    const double logz = highest + std::log(sum);
    const int32_t target = targets_N.ptr<int32_t>()[n];
    set_value(logz_N, n, logz);
    set_value(loss_N, n, logz - z[target]);
    if (config.argmax_N.defined()) {
      config.argmax_N.ptr<int32_t>()[n] = static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
    }
    if (!dh_NC.defined()) continue;
    const double factor = config.factor * (config.weights_N.defined() ? value_at(config.weights_N, n) : 1.0);
    for (int64_t v = 0; v < V; ++v) {
      const double p = std::exp(z[v] - logz) * (1 + 2 * config.z_weight * logz);
      const double dz = factor * (p - (v == target ? 1 : 0));
      for (int64_t c = 0; c < C; ++c) {
        dh[c] += dz * value_at(w_VC, v * C + c);
        set_value(dw_VC, v * C + c, value_at(dw_VC, v * C + c) + dz * value_at(h_NC, n * C + c));
      }
    }
    for (int64_t c = 0; c < C; ++c) set_value(dh_NC, n * C + c, dh[c]);
  }
}

}  // namespace m3
