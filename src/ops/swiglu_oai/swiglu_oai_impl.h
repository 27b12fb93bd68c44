#pragma once
#include "ops/common/simd_formats.h"
#include "ops/swiglu_oai/swiglu_oai_kernel.h"

namespace m3 {
namespace {

// Comparisons keep NaN.
M3_SIMD_INLINE Simd::Vec clamp_above(Simd::Vec x, Simd::Vec limit) {
  return Simd::select(Simd::less(limit, x), limit, x);
}
M3_SIMD_INLINE Simd::Vec clamp_below(Simd::Vec x, Simd::Vec limit) {
  return Simd::select(Simd::less(x, limit), limit, x);
}

M3_SIMD_INLINE Simd::Vec swiglu_lanes(const SwigluOaiParams& p, Simd::Vec g, Simd::Vec u) {
  g = clamp_above(g, Simd::set1(p.limit));
  u = clamp_below(clamp_above(u, Simd::set1(p.limit)), Simd::set1(-p.limit));
  const Simd::Vec silu = Simd::mul(g, sigmoid_lanes(Simd::mul(Simd::set1(p.alpha), g)));
  return Simd::mul(Simd::add(u, Simd::set1(p.beta)), silu);
}

void swiglu_range(const SwigluOaiParams& p, int64_t begin, int64_t end) {
  with_elements(p.gate, p.gate_bf16, [&](const auto* gate) {
    with_elements(p.up, p.up_bf16, [&](const auto* up) {
      with_mutable_elements(p.a, p.a_bf16, [&](auto* a) {
        int64_t i = begin;
        for (; i + Simd::kLanes <= end; i += Simd::kLanes) {
          store_narrow(a + i, swiglu_lanes(p, load_wide(gate + i), load_wide(up + i)));
        }
        for (; i < end; ++i) {  // the same lanes, so that an element does not depend on its place
          float lanes[Simd::kLanes];
          Simd::store(lanes, swiglu_lanes(p, Simd::set1(widen(gate[i])), Simd::set1(widen(up[i]))));
          narrow(lanes[0], a + i);
        }
      });
    });
  });
}

struct SwigluGradient {
  Simd::Vec gate, up;
};
M3_SIMD_INLINE SwigluGradient swiglu_backward_lanes(const SwigluOaiParams& p, Simd::Vec gate, Simd::Vec up,
                                                    Simd::Vec da) {
  using V = Simd;
  const V::Vec limit = V::set1(p.limit), alpha = V::set1(p.alpha);
  const V::Vec g = clamp_above(gate, limit), u = clamp_below(clamp_above(up, limit), V::set1(-p.limit));
  const V::Vec s = sigmoid_lanes(V::mul(alpha, g));
  const V::Vec slope = V::fma(V::mul(alpha, g), V::sub(V::set1(1.0f), s), V::set1(1.0f));
  const V::Vec dgate = V::mul(V::mul(da, V::add(u, V::set1(p.beta))), V::mul(s, slope));
  const V::Vec dup = V::mul(da, V::mul(g, s));
  const V::Mask gate_beyond = V::less(limit, gate);
  const V::Mask up_beyond = V::either(V::less(limit, up), V::less(up, V::set1(-p.limit)));
  return {V::select(gate_beyond, V::zero(), dgate), V::select(up_beyond, V::zero(), dup)};
}

void swiglu_backward_range(const SwigluOaiBackwardParams& p, int64_t begin, int64_t end) {
  const SwigluOaiParams& f = p.forward;
  with_elements(f.gate, f.gate_bf16, [&](const auto* gate) {
    with_elements(f.up, f.up_bf16, [&](const auto* up) {
      with_elements(p.da, p.da_bf16, [&](const auto* da) {
        with_mutable_elements(p.dgate, p.dgate_bf16, [&](auto* dgate) {
          with_mutable_elements(p.dup, p.dup_bf16, [&](auto* dup) {
            int64_t i = begin;
            for (; i + Simd::kLanes <= end; i += Simd::kLanes) {
              const SwigluGradient d =
                  swiglu_backward_lanes(f, load_wide(gate + i), load_wide(up + i), load_wide(da + i));
              store_narrow(dgate + i, d.gate);
              store_narrow(dup + i, d.up);
            }
            for (; i < end; ++i) {
              const SwigluGradient d = swiglu_backward_lanes(f, Simd::set1(widen(gate[i])), Simd::set1(widen(up[i])),
                                                             Simd::set1(widen(da[i])));
              float lanes[Simd::kLanes];
              Simd::store(lanes, d.gate);
              narrow(lanes[0], dgate + i);
              Simd::store(lanes, d.up);
              narrow(lanes[0], dup + i);
            }
          });
        });
      });
    });
  });
}

}  // namespace
}  // namespace m3
