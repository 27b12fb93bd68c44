#pragma once
#include "ops/common/simd_formats.h"
#include "ops/vit_attend/vit_attend_kernel.h"

namespace m3 {
namespace {

float softmax_row(float* scores, int64_t n, int64_t padded, VitRow* row) {
  Simd::Vec highest = Simd::set1(row->maximum);
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) highest = Simd::max(highest, Simd::load(scores + i));
  float maximum = reduce_max(highest);
  for (; i < n; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;

  for (i = n; i < padded; ++i) scores[i] = -__builtin_inff();
  const Simd::Vec shift = Simd::set1(maximum);
  Simd::Vec lanes = Simd::zero();
  for (i = 0; i < padded; i += Simd::kLanes) {  // padded is a multiple of 16
    const Simd::Vec p = exp2_lanes(Simd::sub(Simd::load(scores + i), shift));
    Simd::store(scores + i, p);
    lanes = Simd::add(lanes, p);
  }
  float rescale[Simd::kLanes];
  Simd::store(rescale, exp2_lanes(Simd::set1(row->maximum - maximum)));
  row->sum = row->sum * rescale[0] + reduce_add(lanes);
  row->maximum = maximum;
  return rescale[0];
}

// lse and delta are readable up to `padded` if there is one for each element.
void gradient_row(float* scores, float* gradients, int64_t n, int64_t padded, const float* lse, const float* delta,
                  bool per_row) {
  Simd::Vec lses = Simd::set1(lse[0]), deltas = Simd::set1(delta[0]);
  for (int64_t i = 0; i < padded; i += Simd::kLanes) {
    if (!per_row) {
      lses = Simd::load(lse + i);
      deltas = Simd::load(delta + i);
    }
    const Simd::Vec p = exp2_lanes(Simd::sub(Simd::load(scores + i), lses));
    Simd::store(scores + i, p);
    Simd::store(gradients + i, Simd::mul(p, Simd::sub(Simd::load(gradients + i), deltas)));
  }
  for (int64_t i = n; i < padded; ++i) scores[i] = gradients[i] = 0;
}

}  // namespace
}  // namespace m3
