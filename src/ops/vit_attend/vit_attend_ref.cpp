#include <cmath>
#include <vector>

#include "ops/common/values.h"
#include "ops/vit_attend/vit_attend.h"

namespace m3 {

void vit_attend_ref(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD,
                    std::span<const int32_t> cu_segments, float scale, const Tensor& o_THD, const Tensor& lse_TH) {
  const int64_t H = q_THD.dim(1), D = q_THD.dim(2);
  for (size_t s = 0; s + 1 < cu_segments.size(); ++s) {
    const int64_t begin = cu_segments[s], end = cu_segments[s + 1];
    for (int64_t h = 0; h < H; ++h) {
      const auto at = [&](int64_t token, int64_t d) { return (token * H + h) * D + d; };
      for (int64_t i = begin; i < end; ++i) {
        std::vector<double> p(end - begin);
        double highest = -INFINITY, sum = 0;
        for (int64_t j = begin; j < end; ++j) {
          for (int64_t d = 0; d < D; ++d) p[j - begin] += scale * value_at(q_THD, at(i, d)) * value_at(k_THD, at(j, d));
          highest = std::max(highest, p[j - begin]);
        }
        for (double& x : p) sum += x = std::exp(x - highest);
        for (int64_t d = 0; d < D; ++d) {
          double o = 0;
          for (int64_t j = begin; j < end; ++j) o += p[j - begin] / sum * value_at(v_THD, at(j, d));
          set_value(o_THD, at(i, d), o);
        }
        if (lse_TH.defined()) set_value(lse_TH, i * H + h, highest + std::log(sum));
      }
    }
  }
}

}  // namespace m3
