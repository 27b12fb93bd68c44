#include <cmath>
#include <vector>

#include "ops/common/values.h"
#include "ops/qknorm_rope/qknorm_rope.h"

namespace m3 {

void qknorm_rope_ref(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM, const Tensor& sin_TM, float eps,
                     const Tensor& y_THD) {
  const int64_t H = x_THD.dim(1), D = x_THD.dim(2), M = cos_TM.dim(1);
  std::vector<double> head(D);
  for (int64_t row = 0; row < x_THD.dim(0) * H; ++row) {
    double squares = 0;
    for (int64_t d = 0; d < D; ++d) {
      head[d] = value_at(x_THD, row * D + d);
      squares += head[d] * head[d];
    }
    if (w_D.defined()) {
      const double scale = 1 / std::sqrt(squares / static_cast<double>(D) + eps);
      for (int64_t d = 0; d < D; ++d) head[d] *= scale * (1 + value_at(w_D, d));
    }
    for (int64_t m = 0; m < M; ++m) {
      const double c = value_at(cos_TM, row / H * M + m), s = value_at(sin_TM, row / H * M + m);
      const double a = head[m], b = head[m + M];
      head[m] = a * c - b * s;
      head[m + M] = b * c + a * s;
    }
    for (int64_t d = 0; d < D; ++d) set_value(y_THD, row * D + d, head[d]);
  }
}

}  // namespace m3
