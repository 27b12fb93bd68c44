// One head at a time: sum of squares, then each pair is read, scaled, rotated and written, so y may be x.
#pragma once
#include <cmath>

#include "ops/common/norm_backward_impl.h"
#include "ops/common/simd_formats.h"
#include "ops/qknorm_rope/qknorm_rope_kernel.h"

namespace m3 {
namespace {

using Vec = Simd::Vec;

template <class X>
float head_scale(const X* x, int64_t dim, float eps) {
  Vec lanes = Simd::zero();
  int64_t i = 0;
  for (; i + Simd::kLanes <= dim; i += Simd::kLanes) {
    const Vec v = load_wide(x + i);
    lanes = Simd::fma(v, v, lanes);
  }
  float sum = reduce_add(lanes);
  for (; i < dim; ++i) sum += widen(x[i]) * widen(x[i]);
  return 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
}

// x[i .. i + lanes] after the norm: x · scale · (1 + w).
template <class X, class W>
Vec normed(const X* x, const W* w, float scale, int64_t i) {
  if (w == nullptr) return load_wide(x + i);
  return Simd::mul(Simd::mul(load_wide(x + i), Simd::set1(scale)),
                   Simd::add(Simd::set1(1.0f), load_wide(w + i)));
}
template <class X, class W>
float normed_one(const X* x, const W* w, float scale, int64_t i) {
  return w == nullptr ? widen(x[i]) : widen(x[i]) * scale * (1.0f + widen(w[i]));
}

template <class X, class W, class Y>
void rotate_head(const X* x, const W* w, Y* y, float scale, const float* cos, const float* sin,
                 int64_t pairs, int64_t dim) {
  int64_t m = 0;
  for (; m + Simd::kLanes <= pairs; m += Simd::kLanes) {
    const Vec a = normed(x, w, scale, m), b = normed(x, w, scale, m + pairs);
    const Vec c = Simd::load(cos + m), s = Simd::load(sin + m);
    store_narrow(y + m, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)));
    store_narrow(y + m + pairs, Simd::add(Simd::mul(b, c), Simd::mul(a, s)));
  }
  for (; m < pairs; ++m) {
    const float a = normed_one(x, w, scale, m), b = normed_one(x, w, scale, m + pairs);
    narrow(a * cos[m] - b * sin[m], y + m);
    narrow(b * cos[m] + a * sin[m], y + m + pairs);
  }
  int64_t i = 2 * pairs;
  for (; i + Simd::kLanes <= dim; i += Simd::kLanes) store_narrow(y + i, normed(x, w, scale, i));
  for (; i < dim; ++i) narrow(normed_one(x, w, scale, i), y + i);
}

void qknorm_rope_tokens(const QknormRopeParams& p, int64_t token_begin, int64_t token_end) {
  with_elements(p.x, p.x_bf16, [&](const auto* x) {
    with_elements(p.w, p.w_bf16, [&](const auto* w) {
      with_mutable_elements(p.y, p.y_bf16, [&](auto* y) {
        for (int64_t t = token_begin; t < token_end; ++t) {
          for (int64_t h = 0; h < p.num_heads; ++h) {
            const int64_t at = (t * p.num_heads + h) * p.head_dim;
            const float scale = w == nullptr ? 1.0f : head_scale(x + at, p.head_dim, p.eps);
            rotate_head(x + at, w, y + at, scale, p.cos + t * p.num_pairs, p.sin + t * p.num_pairs,
                        p.num_pairs, p.head_dim);
          }
        }
      });
    });
  });
}

// The rotation by −a is its transpose. From dy into fp32.
template <class DY>
void unrotate_head(const DY* dy, const float* cos, const float* sin, int64_t pairs, int64_t dim,
                   float* out) {
  int64_t m = 0;
  for (; m + Simd::kLanes <= pairs; m += Simd::kLanes) {
    const Vec a = load_wide(dy + m), b = load_wide(dy + m + pairs);
    const Vec c = Simd::load(cos + m), s = Simd::load(sin + m);
    Simd::store(out + m, Simd::add(Simd::mul(a, c), Simd::mul(b, s)));
    Simd::store(out + m + pairs, Simd::sub(Simd::mul(b, c), Simd::mul(a, s)));
  }
  for (; m < pairs; ++m) {
    const float a = widen(dy[m]), b = widen(dy[m + pairs]);
    out[m] = a * cos[m] + b * sin[m];
    out[m + pairs] = b * cos[m] - a * sin[m];
  }
  for (int64_t i = 2 * pairs; i < dim; ++i) out[i] = widen(dy[i]);
}

void qknorm_rope_backward_tokens(const QknormRopeBackwardParams& p, int64_t token_begin,
                                 int64_t token_end, float* dw) {
  alignas(64) float unrotated[kMaxHeadDim];
  with_elements(p.dy, p.dy_bf16, [&](const auto* dy) {
    with_mutable_elements(p.dx, p.dx_bf16, [&](auto* dx) {
      for (int64_t t = token_begin; t < token_end; ++t) {
        for (int64_t h = 0; h < p.num_heads; ++h) {
          const int64_t at = (t * p.num_heads + h) * p.head_dim;
          unrotate_head(dy + at, p.cos + t * p.num_pairs, p.sin + t * p.num_pairs, p.num_pairs,
                        p.head_dim, unrotated);
          if (p.w == nullptr) {
            for (int64_t i = 0; i < p.head_dim; ++i) narrow(unrotated[i], dx + at + i);
            continue;
          }
          with_elements(p.x, p.x_bf16, [&](const auto* x) {
            with_elements(p.w, p.w_bf16, [&](const auto* w) {
              norm_backward_row(x + at, w, unrotated, p.head_dim, p.eps, dx + at, false, dw);
            });
          });
        }
      }
    });
  });
}

}  // namespace
}  // namespace m3
