// GELU(x) = x · Φ(x), with Φ(−|x|) = e^(−x²/2) · t · P(t), t = 1 / (1 + 0.336 |x| / √2), so that both tails keep their
// relative accuracy. P: degree 9, interpolates e^(z²) erfc(z) / (2 t) at Chebyshev nodes for z up to 10 (own fit,
// 2.5e-9 before rounding); beyond, the exponential is 0 in fp32.
#pragma once
#include "ops/common/simd_formats.h"
#include "ops/gelu/gelu_kernel.h"

namespace m3 {
namespace {

// Φ(−|x|) / e^(−x²/2), and that exponential.
struct NormalTail {
  Simd::Vec ratio, density;
};
M3_SIMD_INLINE NormalTail normal_tail(Simd::Vec x) {
  using V = Simd;
  const V::Vec magnitude = V::select(V::less(x, V::zero()), V::sub(V::zero(), x), x);
  const V::Vec t = V::set1(1.0f) / V::fma(magnitude, V::set1(0.336f * 0.70710678f), V::set1(1.0f));
  V::Vec poly = V::set1(0.0548053759f / 2);
  constexpr float kRest[] = {-0.279110382f, 0.493373996f,  -0.389748535f,
                             0.363145091f,  0.0169942814f, 0.187164404f,
                             0.173753685f,  0.19007665f,   0.189545435f};
  for (float c : kRest) poly = V::fma(poly, t, V::set1(c / 2));
  const V::Vec density = exp2_lanes(V::mul(V::mul(x, x), V::set1(-0.72134752f)));  // −log2(e) / 2
  return {V::mul(poly, t), density};
}

M3_SIMD_INLINE Simd::Vec normal_cdf(Simd::Vec x, const NormalTail& tail) {
  const Simd::Vec below = Simd::mul(tail.ratio, tail.density);
  return Simd::select(Simd::less(x, Simd::zero()), below, Simd::sub(Simd::set1(1.0f), below));
}

M3_SIMD_INLINE Simd::Vec gelu_lanes(Simd::Vec x) {
  return Simd::mul(x, normal_cdf(x, normal_tail(x)));
}

void gelu_range(const void* x_data, bool x_bf16, void* y_data, bool y_bf16, int64_t begin,
                int64_t end) {
  with_elements(x_data, x_bf16, [&](const auto* x) {
    with_mutable_elements(y_data, y_bf16, [&](auto* y) {
      int64_t i = begin;
      for (; i + Simd::kLanes <= end; i += Simd::kLanes)
        store_narrow(y + i, gelu_lanes(load_wide(x + i)));
      for (; i < end; ++i) {  // the same lanes, so that an element does not depend on its place
        float lanes[Simd::kLanes];
        Simd::store(lanes, gelu_lanes(Simd::set1(widen(x[i]))));
        narrow(lanes[0], y + i);
      }
    });
  });
}

// Φ(x) + x · φ(x); φ(x) = e^(−x²/2) / √(2π).
M3_SIMD_INLINE Simd::Vec gelu_slope(Simd::Vec x) {
  const NormalTail tail = normal_tail(x);
  return Simd::fma(Simd::mul(x, Simd::set1(0.39894228f)), tail.density, normal_cdf(x, tail));
}

void gelu_backward_range(const GeluBackwardParams& p, int64_t begin, int64_t end) {
  with_elements(p.x, p.x_bf16, [&](const auto* x) {
    with_elements(p.dy, p.dy_bf16, [&](const auto* dy) {
      with_mutable_elements(p.dx, p.dx_bf16, [&](auto* dx) {
        int64_t i = begin;
        for (; i + Simd::kLanes <= end; i += Simd::kLanes) {
          store_narrow(dx + i, Simd::mul(load_wide(dy + i), gelu_slope(load_wide(x + i))));
        }
        for (; i < end; ++i) {
          float lanes[Simd::kLanes];
          Simd::store(lanes, gelu_slope(Simd::set1(widen(x[i]))));
          narrow(widen(dy[i]) * lanes[0], dx + i);
        }
      });
    });
  });
}

}  // namespace
}  // namespace m3
