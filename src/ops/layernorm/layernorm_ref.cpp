#include <cmath>

#include "ops/common/values.h"
#include "ops/layernorm/layernorm.h"

namespace m3 {

void layernorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC,
                   float eps) {
  const int64_t C = x_TC.dim(1);
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < C; ++c) mean += value_at(x_TC, t * C + c) / static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c)
      variance += std::pow(value_at(x_TC, t * C + c) - mean, 2) / static_cast<double>(C);
    const double scale = 1 / std::sqrt(variance + eps);
    for (int64_t c = 0; c < C; ++c) {
      set_value(y_TC, t * C + c,
                (value_at(x_TC, t * C + c) - mean) * scale * value_at(w_C, c) + value_at(b_C, c));
    }
  }
}

void layernorm_backward_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                            const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C,
                            const Tensor& db_C) {
  const int64_t C = x_TC.dim(1);
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    const auto x = [&](int64_t c) { return value_at(x_TC, t * C + c); };
    const auto dy = [&](int64_t c) { return value_at(dy_TC, t * C + c); };
    double mean = 0, variance = 0, plain = 0, along = 0;
    for (int64_t c = 0; c < C; ++c) mean += x(c) / static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c) variance += std::pow(x(c) - mean, 2) / static_cast<double>(C);
    const double scale = 1 / std::sqrt(variance + eps);
    for (int64_t c = 0; c < C; ++c) {
      const double n = (x(c) - mean) * scale, g = dy(c) * value_at(w_C, c);
      plain += g / static_cast<double>(C);
      along += g * n / static_cast<double>(C);
      set_value(dw_C, c, value_at(dw_C, c) + dy(c) * n);
      set_value(db_C, c, value_at(db_C, c) + dy(c));
    }
    for (int64_t c = 0; c < C; ++c) {
      const double dx = scale * (dy(c) * value_at(w_C, c) - plain - (x(c) - mean) * scale * along);
      set_value(dx_TC, t * C + c, accumulate_dx ? value_at(dx_TC, t * C + c) + dx : dx);
    }
  }
}

}  // namespace m3
