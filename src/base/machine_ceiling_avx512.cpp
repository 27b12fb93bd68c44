#include <immintrin.h>

#include "base/machine_ceiling.h"

namespace m3::ceiling {

double fma_avx512(long rounds, float* sum) {
  constexpr int kChains = 16;
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (long round = 0; round < rounds; ++round) {
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_fmadd_ps(acc[i], a, b);
  }
  for (int i = 0; i < kChains; ++i) *sum += _mm512_cvtss_f32(acc[i]);
  return 2.0 * 16 * kChains * static_cast<double>(rounds);
}

}  // namespace m3::ceiling
