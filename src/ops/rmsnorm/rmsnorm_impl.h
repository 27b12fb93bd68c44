// Two passes over a row, which the first leaves in L1: sum of squares in lanes, then scale.
#pragma once
#include <cmath>

#include "ops/common/norm_backward_impl.h"
#include "ops/common/simd_formats.h"
#include "ops/rmsnorm/rmsnorm_kernel.h"

namespace m3 {
namespace {

template <class X, class D>
void add_row(X* x, const D* delta, int64_t n) {
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    store_narrow(x + i, Simd::add(load_wide(x + i), load_wide(delta + i)));
  }
  for (; i < n; ++i) narrow(widen(x[i]) + widen(delta[i]), x + i);
}

template <class X>
float sum_of_squares(const X* x, int64_t n) {
  Simd::Vec lanes = Simd::zero();
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    const Simd::Vec v = load_wide(x + i);
    lanes = Simd::fma(v, v, lanes);
  }
  float sum = reduce_add(lanes);
  for (; i < n; ++i) sum += widen(x[i]) * widen(x[i]);
  return sum;
}

template <class X, class W, class Y>
void scale_row(const X* x, const W* w, Y* y, float scale, int64_t n) {
  const Simd::Vec scales = Simd::set1(scale), one = Simd::set1(1.0f);
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    store_narrow(y + i,
                 Simd::mul(Simd::mul(load_wide(x + i), scales), Simd::add(one, load_wide(w + i))));
  }
  for (; i < n; ++i) narrow(widen(x[i]) * scale * (1.0f + widen(w[i])), y + i);
}

void rmsnorm_rows(const RmsnormParams& p, int64_t row_begin, int64_t row_end) {
  const int64_t n = p.hidden;
  with_mutable_elements(p.x, p.x_bf16, [&](auto* x) {
    with_elements(p.w, p.w_bf16, [&](const auto* w) {
      with_mutable_elements(p.y, p.y_bf16, [&](auto* y) {
        for (int64_t row = row_begin; row < row_end; ++row) {
          if (p.delta != nullptr) {
            with_elements(p.delta, p.delta_bf16,
                          [&](const auto* delta) { add_row(x + row * n, delta + row * n, n); });
          }
          const float mean = sum_of_squares(x + row * n, n) / static_cast<float>(n);
          scale_row(x + row * n, w, y + row * n, 1.0f / std::sqrt(mean + p.eps), n);
        }
      });
    });
  });
}

void rmsnorm_backward_rows(const RmsnormBackwardParams& p, int64_t row_begin, int64_t row_end,
                           float* dw) {
  const int64_t n = p.hidden;
  with_elements(p.x, p.x_bf16, [&](const auto* x) {
    with_elements(p.w, p.w_bf16, [&](const auto* w) {
      with_elements(p.dy, p.dy_bf16, [&](const auto* dy) {
        with_mutable_elements(p.dx, p.dx_bf16, [&](auto* dx) {
          for (int64_t row = row_begin; row < row_end; ++row) {
            norm_backward_row(x + row * n, w, dy + row * n, n, p.eps, dx + row * n, p.accumulate_dx,
                              dw);
          }
        });
      });
    });
  });
}

}  // namespace
}  // namespace m3
