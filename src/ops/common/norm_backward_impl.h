// Gradient of y = x · r · (1 + w), r = rsqrt(mean(x²) + eps), for one row: the RMSNorm of a token or of a head. For
// kernel files only.
#pragma once
#include <cmath>

#include "ops/common/simd_formats.h"

namespace m3 {
namespace {

// dx = or += the gradient; dw[i] += dy · x · r. dx may be dy.
template <class X, class W, class DY, class DX>
void norm_backward_row(const X* x, const W* w, const DY* dy, int64_t n, float eps, DX* dx, bool accumulate,
                       float* dw) {
  using Vec = Simd::Vec;
  const Vec one = Simd::set1(1.0f);
  Vec squares = Simd::zero(), products = Simd::zero();
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Vec v = load_wide(x + i);
    squares = Simd::fma(v, v, squares);
    products = Simd::fma(Simd::mul(load_wide(dy + i), Simd::add(one, load_wide(w + i))), v, products);
  }
  float square_sum = reduce_add(squares), dot = reduce_add(products);
  for (; i < n; ++i) {
    square_sum += widen(x[i]) * widen(x[i]);
    dot += widen(dy[i]) * (1.0f + widen(w[i])) * widen(x[i]);
  }
  const float r = 1.0f / std::sqrt(square_sum / static_cast<float>(n) + eps);
  const float along = r * r * (dot / static_cast<float>(n));  // dx = r · (dy · (1 + w) − x · along)

  const Vec rs = Simd::set1(r), alongs = Simd::set1(along);
  for (i = 0; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Vec v = load_wide(x + i), d = load_wide(dy + i);
    const Vec g = Simd::mul(d, Simd::add(one, load_wide(w + i)));
    Vec out = Simd::mul(rs, Simd::sub(g, Simd::mul(v, alongs)));
    if (accumulate) out = Simd::add(load_wide(dx + i), out);
    Simd::store(dw + i, Simd::fma(d, Simd::mul(v, rs), Simd::load(dw + i)));
    store_narrow(dx + i, out);
  }
  for (; i < n; ++i) {
    const float v = widen(x[i]), d = widen(dy[i]);
    float out = r * (d * (1.0f + widen(w[i])) - v * along);
    if (accumulate) out = widen(dx[i]) + out;
    dw[i] += d * (v * r);
    narrow(out, dx + i);
  }
}

}  // namespace
}  // namespace m3
