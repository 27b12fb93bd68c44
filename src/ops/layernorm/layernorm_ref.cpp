#include <cmath>

#include "ops/common/values.h"
#include "ops/layernorm/layernorm.h"

namespace m3 {

void layernorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC, float eps) {
  const int64_t C = x_TC.dim(1);
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < C; ++c) mean += value_at(x_TC, t * C + c) / static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c) variance += std::pow(value_at(x_TC, t * C + c) - mean, 2) / static_cast<double>(C);
    const double scale = 1 / std::sqrt(variance + eps);
    for (int64_t c = 0; c < C; ++c) {
      set_value(y_TC, t * C + c, (value_at(x_TC, t * C + c) - mean) * scale * value_at(w_C, c) + value_at(b_C, c));
    }
  }
}

}  // namespace m3
