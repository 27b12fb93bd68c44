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

}  // namespace m3
