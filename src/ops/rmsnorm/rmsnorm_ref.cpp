#include <cmath>

#include "ops/common/values.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

void rmsnorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps) {
  const int64_t C = x_TC.dim(1);
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    double squares = 0;
    for (int64_t c = 0; c < C; ++c) squares += value_at(x_TC, t * C + c) * value_at(x_TC, t * C + c);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(C) + eps);
    for (int64_t c = 0; c < C; ++c) set_value(y_TC, t * C + c, value_at(x_TC, t * C + c) * scale * (1 + value_at(w_C, c)));
  }
}

}  // namespace m3
