#include <cmath>
#include <vector>

#include "ops/common/values.h"
#include "ops/qknorm_rope/qknorm_rope.h"

namespace m3 {

void qknorm_rope_ref(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM,
                     const Tensor& sin_TM, float eps, const Tensor& y_THD) {
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

void qknorm_rope_backward_ref(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM,
                              const Tensor& sin_TM, float eps, const Tensor& dy_THD,
                              const Tensor& dx_THD, const Tensor& dw_D) {
  const int64_t H = dy_THD.dim(1), D = dy_THD.dim(2), M = cos_TM.dim(1);
  std::vector<double> g(D);
  for (int64_t row = 0; row < dy_THD.dim(0) * H; ++row) {
    for (int64_t d = 0; d < D; ++d) g[d] = value_at(dy_THD, row * D + d);
    for (int64_t m = 0; m < M; ++m) {
      const double c = value_at(cos_TM, row / H * M + m), s = value_at(sin_TM, row / H * M + m);
      const double a = g[m], b = g[m + M];
      g[m] = a * c + b * s;
      g[m + M] = b * c - a * s;
    }
    if (w_D.defined()) {
      const auto x = [&](int64_t d) { return value_at(x_THD, row * D + d); };
      double squares = 0, dot = 0;
      for (int64_t d = 0; d < D; ++d) squares += x(d) * x(d);
      const double scale = 1 / std::sqrt(squares / static_cast<double>(D) + eps);
      for (int64_t d = 0; d < D; ++d) {
        set_value(dw_D, d, value_at(dw_D, d) + g[d] * x(d) * scale);
        g[d] *= 1 + value_at(w_D, d);
        dot += g[d] * x(d) * scale;
      }
      for (int64_t d = 0; d < D; ++d)
        g[d] = scale * (g[d] - x(d) * scale * dot / static_cast<double>(D));
    }
    for (int64_t d = 0; d < D; ++d) set_value(dx_THD, row * D + d, g[d]);
  }
}

}  // namespace m3
