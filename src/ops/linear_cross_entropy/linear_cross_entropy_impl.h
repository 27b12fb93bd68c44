#pragma once
#include <cmath>

#include "ops/common/simd_formats.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernel.h"

namespace m3 {
namespace {

constexpr float kLog2E = 1.44269504f;

M3_SIMD_INLINE Simd::Vec exp_lanes(Simd::Vec x) {
  return exp2_lanes(Simd::mul(x, Simd::set1(kLog2E)));
}
M3_SIMD_INLINE float exp_one(float x) {
  float lanes[Simd::kLanes];
  Simd::store(lanes, exp_lanes(Simd::set1(x)));
  return lanes[0];
}

double log_sum(const float* z, int64_t n) {
  Simd::Vec highest = Simd::set1(z[0]);
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) highest = Simd::max(highest, Simd::load(z + i));
  float maximum = reduce_max(highest);
  for (; i < n; ++i) maximum = z[i] > maximum ? z[i] : maximum;

  // A sum of 200,000 terms in fp32 would lose four digits.
  constexpr int64_t kBlock = 1024;
  const Simd::Vec shift = Simd::set1(maximum);
  double sum = 0;
  i = 0;
  while (i + Simd::kLanes <= n) {
    Simd::Vec lanes = Simd::zero();
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    for (; i + Simd::kLanes <= end; i += Simd::kLanes) {
      lanes = Simd::add(lanes, exp_lanes(Simd::sub(Simd::load(z + i), shift)));
    }
    sum += reduce_add(lanes);
  }
  for (; i < n; ++i) sum += exp_one(z[i] - maximum);
  return maximum + std::log(sum);
}

template <class T>
void softmax_row(const float* z, int64_t n, float logz, float scale, T* out) {
  const Simd::Vec shift = Simd::set1(logz), scales = Simd::set1(scale);
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) {
    store_narrow(out + i, Simd::mul(scales, exp_lanes(Simd::sub(Simd::load(z + i), shift))));
  }
  for (; i < n; ++i) narrow(scale * exp_one(z[i] - logz), out + i);
}

void softmax(const float* z, int64_t n, float logz, float scale, void* out, bool out_bf16) {
  with_mutable_elements(out, out_bf16, [&](auto* to) { softmax_row(z, n, logz, scale, to); });
}

}  // namespace
}  // namespace m3
