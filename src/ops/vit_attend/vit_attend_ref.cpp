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

void vit_attend_backward_ref(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD, const Tensor& do_THD,
                             std::span<const int32_t> cu_segments, float scale, const Tensor& dq_THD,
                             const Tensor& dk_THD, const Tensor& dv_THD) {
  const int64_t H = q_THD.dim(1), D = q_THD.dim(2), size = q_THD.numel();
  std::vector<double> dq(size), dk(size), dv(size);
  for (size_t s = 0; s + 1 < cu_segments.size(); ++s) {
    const int64_t begin = cu_segments[s], end = cu_segments[s + 1];
    for (int64_t row = begin * H; row < end * H; ++row) {
      const int64_t i = row / H, h = row % H;
      const auto at = [&](int64_t token, int64_t d) { return (token * H + h) * D + d; };
      const auto dot = [&](const Tensor& a, int64_t ta, const Tensor& b, int64_t tb) {
        double sum = 0;
        for (int64_t d = 0; d < D; ++d) sum += value_at(a, at(ta, d)) * value_at(b, at(tb, d));
        return sum;
      };
      std::vector<double> p(end - begin), dp(end - begin);
      double highest = -INFINITY, sum = 0, delta = 0;
      for (int64_t j = begin; j < end; ++j) highest = std::max(highest, p[j - begin] = scale * dot(q_THD, i, k_THD, j));
      for (double& x : p) sum += x = std::exp(x - highest);
      for (int64_t j = begin; j < end; ++j) {
        p[j - begin] /= sum;
        dp[j - begin] = dot(do_THD, i, v_THD, j);
        delta += p[j - begin] * dp[j - begin];
      }
      for (int64_t j = begin; j < end; ++j) {
        const double ds = scale * p[j - begin] * (dp[j - begin] - delta);
        for (int64_t d = 0; d < D; ++d) {
          dq[at(i, d)] += ds * value_at(k_THD, at(j, d));
          dk[at(j, d)] += ds * value_at(q_THD, at(i, d));
          dv[at(j, d)] += p[j - begin] * value_at(do_THD, at(i, d));
        }
      }
    }
  }
  for (int64_t x = 0; x < size; ++x) {
    set_value(dq_THD, x, dq[x]);
    set_value(dk_THD, x, dk[x]);
    set_value(dv_THD, x, dv[x]);
  }
}

}  // namespace m3
