#include <cmath>

#include "ops/common/values.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

void rmsnorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps) {
  const int64_t C = x_TC.dim(1);
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    double squares = 0;
    for (int64_t c = 0; c < C; ++c)
      squares += value_at(x_TC, t * C + c) * value_at(x_TC, t * C + c);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(C) + eps);
    for (int64_t c = 0; c < C; ++c)
      set_value(y_TC, t * C + c, value_at(x_TC, t * C + c) * scale * (1 + value_at(w_C, c)));
  }
}

void rmsnorm_backward_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                          const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C) {
  const int64_t C = x_TC.dim(1);
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    const auto x = [&](int64_t c) { return value_at(x_TC, t * C + c); };
    const auto dy = [&](int64_t c) { return value_at(dy_TC, t * C + c); };
    double squares = 0, dot = 0;
    for (int64_t c = 0; c < C; ++c) squares += x(c) * x(c);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(C) + eps);
    for (int64_t c = 0; c < C; ++c) {
      dot += dy(c) * (1 + value_at(w_C, c)) * x(c) * scale;
      set_value(dw_C, c, value_at(dw_C, c) + dy(c) * x(c) * scale);
    }
    for (int64_t c = 0; c < C; ++c) {
      const double dx =
          scale * (dy(c) * (1 + value_at(w_C, c)) - x(c) * scale * dot / static_cast<double>(C));
      set_value(dx_TC, t * C + c, accumulate_dx ? value_at(dx_TC, t * C + c) + dx : dx);
    }
  }
}

}  // namespace m3
