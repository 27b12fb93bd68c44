#include <cmath>

#include "ops/common/values.h"
#include "ops/gelu/gelu.h"

namespace m3 {

// 1 + erf(z) = erfc(−z), which keeps the lower tail.
void gelu_ref(const Tensor& x, const Tensor& y) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = value_at(x, i);
    set_value(y, i, 0.5 * v * std::erfc(-v / std::sqrt(2.0)));
  }
}

void gelu_backward_ref(const Tensor& x, const Tensor& dy, const Tensor& dx) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = value_at(x, i),
                 density = std::exp(-0.5 * v * v) / std::sqrt(2 * 3.141592653589793);
    set_value(dx, i, value_at(dy, i) * (0.5 * std::erfc(-v / std::sqrt(2.0)) + v * density));
  }
}

}  // namespace m3
