// Loads and stores of bf16 and e4m3 for the vectors of simd.h. Only kernel files include this header.
#pragma once
#include "ops/common/simd.h"

namespace m3 {
namespace {  // NOLINT: see simd.h

M3_SIMD_INLINE float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
M3_SIMD_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

// One value; bf16 is handled as its bits.
M3_SIMD_INLINE float widen(float x) { return x; }
M3_SIMD_INLINE float widen(uint16_t x) { return float_of_bits(uint32_t{x} << 16); }
M3_SIMD_INLINE void narrow(float x, float* out) { *out = x; }
M3_SIMD_INLINE void narrow(float x, uint16_t* out) {  // to nearest, ties to even; NaN stays NaN
  const uint32_t u = bits_of_float(x);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
  *out = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40) : rounded);
}

// Calls f with the elements as const float* or as const uint16_t* (bf16 bits).
template <typename F>
M3_SIMD_INLINE void with_elements(const void* p, bool is_bf16, F&& f) {
  if (is_bf16) {
    f(static_cast<const uint16_t*>(p));
  } else {
    f(static_cast<const float*>(p));
  }
}
template <typename F>
M3_SIMD_INLINE void with_mutable_elements(void* p, bool is_bf16, F&& f) {
  if (is_bf16) {
    f(static_cast<uint16_t*>(p));
  } else {
    f(static_cast<float*>(p));
  }
}

M3_SIMD_INLINE Simd::Vec load_wide(const float* p) { return Simd::load(p); }
M3_SIMD_INLINE Simd::Vec load_wide(const uint16_t* p) {
  return Simd::as_floats(Simd::shift_left_16(Simd::load_halves(p)));
}
M3_SIMD_INLINE void store_narrow(float* p, Simd::Vec x) { Simd::store(p, x); }

#if defined(__AVX512F__)

M3_SIMD_INLINE void store_narrow(uint16_t* p, __m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Exponent and mantissa shifted into place are 2^120 too small; NaN becomes all ones.
M3_SIMD_INLINE __m512 load_e4m3(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(wide, 7), 31);
  const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
  const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
  const __m512i bits = _mm512_or_si512(_mm512_castps_si512(value), sign);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, is_nan, _mm512_set1_epi32(-1)));
}

M3_SIMD_INLINE __m512 sqrt_lanes(__m512 x) { return _mm512_sqrt_ps(x); }

// dst[i] += sum of the lanes of r[i], i < 4, in a fixed order.
M3_SIMD_INLINE void add_lane_sums(float* dst, const __m512* r) {
  __m256 half[4];
  for (int i = 0; i < 4; ++i) half[i] = _mm256_add_ps(_mm512_castps512_ps256(r[i]), _mm512_extractf32x8_ps(r[i], 1));
  const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
  _mm_storeu_ps(dst, _mm_add_ps(_mm_loadu_ps(dst), sums));
}

#elif defined(__AVX2__)

M3_SIMD_INLINE void store_narrow(uint16_t* p, __m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

M3_SIMD_INLINE __m256 load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(wide, 7), 31);
  const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(0x1p120f));
  return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_or_si256(sign, is_nan)));
}

M3_SIMD_INLINE __m256 sqrt_lanes(__m256 x) { return _mm256_sqrt_ps(x); }

M3_SIMD_INLINE void add_lane_sums(float* dst, const __m256* r) {
  const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
  _mm_storeu_ps(dst, _mm_add_ps(_mm_loadu_ps(dst), sums));
}

#else

M3_SIMD_INLINE void store_narrow(uint16_t* p, Simd::Vec x) {
  for (int i = 0; i < 4; ++i) narrow(x[i], p + i);
}

M3_SIMD_INLINE Simd::Vec load_e4m3(const uint8_t* p) {
  Simd::Vec x;
  for (int i = 0; i < 4; ++i) {
    const uint32_t magnitude = p[i] & 0x7fu, sign = uint32_t{p[i]} >> 7 << 31;
    const float value = float_of_bits(magnitude << 20) * 0x1p120f;
    x[i] = float_of_bits(magnitude == 0x7f ? 0x7fc00000u : bits_of_float(value) | sign);
  }
  return x;
}

M3_SIMD_INLINE Simd::Vec sqrt_lanes(Simd::Vec x) {
  return Simd::Vec{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
}

M3_SIMD_INLINE void add_lane_sums(float* dst, const Simd::Vec* r) {
  for (int i = 0; i < 4; ++i) dst[i] += (r[i][0] + r[i][1]) + (r[i][2] + r[i][3]);
}

#endif

// In place: lane j of vector i becomes lane i of vector j. Moves bits only.
M3_SIMD_INLINE void transpose_lanes(Simd::Vec* x) {
  Simd::Words words[Simd::kLanes];
  for (int i = 0; i < Simd::kLanes; ++i) __builtin_memcpy(&words[i], &x[i], sizeof(x[i]));
  Simd::transpose(words);
  for (int i = 0; i < Simd::kLanes; ++i) x[i] = Simd::as_floats(words[i]);
}

// 1 / (1 + e^-x); NaN stays NaN.
M3_SIMD_INLINE Simd::Vec sigmoid_lanes(Simd::Vec x) {
  using V = Simd;
  V::Vec power = V::mul(x, V::set1(-1.44269504f));
  power = V::select(V::less(V::set1(126.0f), power), V::set1(126.0f), power);  // below, the result is 0 to fp32
  return V::set1(1.0f) / V::add(V::set1(1.0f), exp2_lanes(power));
}

}  // namespace
}  // namespace m3
