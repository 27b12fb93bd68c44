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

}  // namespace
}  // namespace m3
