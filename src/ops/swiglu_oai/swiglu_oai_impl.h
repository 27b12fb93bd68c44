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

}  // namespace
}  // namespace m3
