#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/index_select/index_keys8.h"

namespace m3 {

void index_keys8_ref(const Tensor& x_PBX, int64_t first, int64_t count, const IndexKeys8& keys) {
  const int64_t B = x_PBX.dim(1), X = x_PBX.dim(2);
  const bf16* x = x_PBX.ptr<bf16>();
  for (int64_t page = first; page < first + count; ++page) {
    const bf16* rows = x + page * B * X;
    float largest = 0;
    for (int64_t i = 0; i < B * X; ++i) {
      const float value = std::abs(to_float(rows[i]));
      if (std::isfinite(value)) largest = std::max(largest, value);
    }
    const float scale = largest / 127.0f;
    double error = 0, norm = 0;
    for (int64_t j = 0; j < B; ++j) {
      double error2 = 0, norm2 = 0;
      for (int64_t c = 0; c < X; ++c) {
        const float value = to_float(rows[j * X + c]);
        int code = 0;
        if (std::isinf(value)) {
          code = value > 0 ? 127 : -127;
        } else if (!std::isnan(value) && scale > 0) {
          code = static_cast<int>(std::nearbyint(value / scale));
        }
        keys.codes_PBX[(page * B + j) * X + c] = static_cast<int8_t>(code);
        const double difference = double{scale} * code - value;
        error2 += difference * difference;
        norm2 += double{value} * value;
      }
      if (std::isnan(norm2)) continue;
      error = std::max(
          error, std::isinf(norm2) ? std::numeric_limits<double>::infinity() : std::sqrt(error2));
      norm = std::max(norm, std::sqrt(norm2));
    }
    keys.scale_P[page] = scale;
    keys.error_P[page] =
        std::nextafter(static_cast<float>(error), std::numeric_limits<float>::infinity());
    keys.norm_P[page] =
        std::nextafter(static_cast<float>(norm), std::numeric_limits<float>::infinity());
  }
}

}  // namespace m3
