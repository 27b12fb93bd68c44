// Three passes over a row, which the first leaves in L1: mean, variance around it, result.
#pragma once
#include <cmath>

#include "ops/common/simd_formats.h"
#include "ops/layernorm/layernorm_kernel.h"

namespace m3 {
namespace {

template <class X>
float row_mean(const X* x, int64_t n) {
  Simd::Vec lanes = Simd::zero();
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) lanes = Simd::add(lanes, load_wide(x + i));
  float sum = reduce_add(lanes);
  for (; i < n; ++i) sum += widen(x[i]);
  return sum / static_cast<float>(n);
}

template <class X>
float row_variance(const X* x, float mean, int64_t n) {
  const Simd::Vec means = Simd::set1(mean);
  Simd::Vec lanes = Simd::zero();
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Simd::Vec d = Simd::sub(load_wide(x + i), means);
    lanes = Simd::fma(d, d, lanes);
  }
  float sum = reduce_add(lanes);
  for (; i < n; ++i) sum += (widen(x[i]) - mean) * (widen(x[i]) - mean);
  return sum / static_cast<float>(n);
}

template <class X, class W, class B, class Y>
void normalise_row(const X* x, const W* w, const B* b, Y* y, float mean, float scale, int64_t n) {
  const Simd::Vec means = Simd::set1(mean), scales = Simd::set1(scale);
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Simd::Vec v = Simd::mul(Simd::sub(load_wide(x + i), means), scales);
    store_narrow(y + i, Simd::add(Simd::mul(v, load_wide(w + i)), load_wide(b + i)));
  }
  for (; i < n; ++i) narrow((widen(x[i]) - mean) * scale * widen(w[i]) + widen(b[i]), y + i);
}

void layernorm_rows(const LayernormParams& p, int64_t row_begin, int64_t row_end) {
  const int64_t n = p.hidden;
  with_elements(p.x, p.x_bf16, [&](const auto* x) {
    with_elements(p.w, p.w_bf16, [&](const auto* w) {
      with_elements(p.b, p.b_bf16, [&](const auto* b) {
        with_mutable_elements(p.y, p.y_bf16, [&](auto* y) {
          for (int64_t row = row_begin; row < row_end; ++row) {
            const float mean = row_mean(x + row * n, n);
            const float scale = 1.0f / std::sqrt(row_variance(x + row * n, mean, n) + p.eps);
            normalise_row(x + row * n, w, b, y + row * n, mean, scale, n);
          }
        });
      });
    });
  });
}

// Sums over a row of g = dy · w and of g · (x − mean).
struct GradientSums {
  float plain, centred;
};
template <class X, class W, class DY>
GradientSums gradient_sums(const X* x, const W* w, const DY* dy, float mean, int64_t n) {
  const Simd::Vec means = Simd::set1(mean);
  Simd::Vec plain = Simd::zero(), centred = Simd::zero();
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Simd::Vec g = Simd::mul(load_wide(dy + i), load_wide(w + i));
    plain = Simd::add(plain, g);
    centred = Simd::fma(g, Simd::sub(load_wide(x + i), means), centred);
  }
  GradientSums sums = {reduce_add(plain), reduce_add(centred)};
  for (; i < n; ++i) {
    const float g = widen(dy[i]) * widen(w[i]);
    sums.plain += g;
    sums.centred += g * (widen(x[i]) - mean);
  }
  return sums;
}

template <class X, class W, class DY, class DX>
void layernorm_backward_row(const X* x, const W* w, const DY* dy, int64_t n, float eps, DX* dx,
                            bool accumulate, float* dw, float* db) {
  using Vec = Simd::Vec;
  const float mean = row_mean(x, n), r = 1.0f / std::sqrt(row_variance(x, mean, n) + eps);
  const GradientSums sums = gradient_sums(x, w, dy, mean, n);
  const float plain = sums.plain / static_cast<float>(n),
              along = r * r * (sums.centred / static_cast<float>(n));
  // dx = r · (dy · w − plain − (x − mean) · along)
  const Vec means = Simd::set1(mean), rs = Simd::set1(r), plains = Simd::set1(plain),
            alongs = Simd::set1(along);
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Vec v = Simd::sub(load_wide(x + i), means), d = load_wide(dy + i);
    const Vec g = Simd::sub(Simd::mul(d, load_wide(w + i)), plains);
    Vec out = Simd::mul(rs, Simd::sub(g, Simd::mul(v, alongs)));
    if (accumulate) out = Simd::add(load_wide(dx + i), out);
    Simd::store(dw + i, Simd::fma(d, Simd::mul(v, rs), Simd::load(dw + i)));
    Simd::store(db + i, Simd::add(d, Simd::load(db + i)));
    store_narrow(dx + i, out);
  }
  for (; i < n; ++i) {
    const float v = widen(x[i]) - mean, d = widen(dy[i]);
    float out = r * (d * widen(w[i]) - plain - v * along);
    if (accumulate) out = widen(dx[i]) + out;
    dw[i] += d * (v * r);
    db[i] += d;
    narrow(out, dx + i);
  }
}

void layernorm_backward_rows(const LayernormBackwardParams& p, int64_t row_begin, int64_t row_end,
                             float* dw, float* db) {
  const int64_t n = p.hidden;
  with_elements(p.x, p.x_bf16, [&](const auto* x) {
    with_elements(p.w, p.w_bf16, [&](const auto* w) {
      with_elements(p.dy, p.dy_bf16, [&](const auto* dy) {
        with_mutable_elements(p.dx, p.dx_bf16, [&](auto* dx) {
          for (int64_t row = row_begin; row < row_end; ++row) {
            layernorm_backward_row(x + row * n, w, dy + row * n, n, p.eps, dx + row * n,
                                   p.accumulate_dx, dw, db);
          }
        });
      });
    });
  });
}

}  // namespace
}  // namespace m3
