// No fused multiply-adds, so that every instruction set gives the same bits.
#pragma once
#include <cmath>

#include "ops/adamw/adamw_kernel.h"
#include "ops/common/simd_formats.h"

namespace m3 {
namespace {

template <class M, class V>
void update(const AdamWParams& p, M* m, V* v, int64_t i) {
  const float g = p.g[i] * p.grad_factor;
  const float first = p.beta1 * widen(m[i]) + (1.0f - p.beta1) * g;
  const float second = p.beta2 * widen(v[i]) + (1.0f - p.beta2) * (g * g);
  const float step = first * p.m_correction / (std::sqrt(second * p.v_correction) + p.eps);
  p.w[i] = p.w[i] - p.lr * (step + p.weight_decay * p.w[i]);
  narrow(first, m + i);
  narrow(second, v + i);
  if (p.copy != nullptr) narrow(p.w[i], static_cast<uint16_t*>(p.copy) + i);
}

template <class M, class V>
void update_lanes(const AdamWParams& p, M* m, V* v, int64_t i) {
  using S = Simd;
  const S::Vec g = S::mul(S::load(p.g + i), S::set1(p.grad_factor));
  const S::Vec first =
      S::add(S::mul(S::set1(p.beta1), load_wide(m + i)), S::mul(S::set1(1.0f - p.beta1), g));
  const S::Vec second = S::add(S::mul(S::set1(p.beta2), load_wide(v + i)),
                               S::mul(S::set1(1.0f - p.beta2), S::mul(g, g)));
  const S::Vec root = sqrt_lanes(S::mul(second, S::set1(p.v_correction)));
  const S::Vec step = S::mul(first, S::set1(p.m_correction)) / S::add(root, S::set1(p.eps));
  S::Vec w = S::load(p.w + i);
  w = S::sub(w, S::mul(S::set1(p.lr), S::add(step, S::mul(S::set1(p.weight_decay), w))));
  S::store(p.w + i, w);
  store_narrow(m + i, first);
  store_narrow(v + i, second);
  if (p.copy != nullptr) store_narrow(static_cast<uint16_t*>(p.copy) + i, w);
}

void adamw_range(const AdamWParams& p, int64_t begin, int64_t end) {
  with_mutable_elements(p.m, p.m_bf16, [&](auto* m) {
    with_mutable_elements(p.v, p.v_bf16, [&](auto* v) {
      int64_t i = begin;
      for (; i + Simd::kLanes <= end; i += Simd::kLanes) update_lanes(p, m, v, i);
      for (; i < end; ++i) update(p, m, v, i);
    });
  });
}

}  // namespace
}  // namespace m3
