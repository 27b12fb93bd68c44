#include <immintrin.h>

#include "base/machine_ceiling.h"

namespace m3::ceiling {

// Twelve chains of 8 lanes hide the latency of four or five cycles on two FMA ports.
double fma_avx2(long rounds, float* sum) {
  constexpr int kChains = 12;
  __m256 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (long round = 0; round < rounds; ++round) {
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_ps(acc[i], a, b);
  }
  for (int i = 0; i < kChains; ++i) *sum += _mm256_cvtss_f32(acc[i]);
  return 2.0 * 8 * kChains * static_cast<double>(rounds);
}

}  // namespace m3::ceiling
