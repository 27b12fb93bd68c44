// Vectors of fp32 lanes, one type per instruction set, with the same members. A translation unit sees
// the type that its own compiler flags allow (X_avx512.cpp, X_avx2.cpp, X.cpp), under the name `Simd`.
//
// Everything has internal linkage on purpose: the same inline function compiled for AVX-512 in one
// file and for SSE2 in another must not be merged by the linker, or old CPUs would meet new
// instructions. For the same reason only kernel files include this header.
#pragma once
#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace m3 {
namespace {  // NOLINT: see above

#define M3_SIMD_INLINE [[gnu::always_inline]] static inline

#if defined(__AVX512F__)

struct Simd {
  static constexpr int kLanes = 16;
  static constexpr int kTileRows = 6, kTileVecs = 4;  // 24 of 32 registers accumulate
  using Vec = __m512;
  using Words = __m512i;  // 32-bit lanes
  using Mask = __mmask16;

  M3_SIMD_INLINE Vec zero() { return _mm512_setzero_ps(); }
  M3_SIMD_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
  M3_SIMD_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  M3_SIMD_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  M3_SIMD_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  M3_SIMD_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  M3_SIMD_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  M3_SIMD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  M3_SIMD_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if either is NaN
  M3_SIMD_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  M3_SIMD_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  M3_SIMD_INLINE Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  M3_SIMD_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
  M3_SIMD_INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // x * 2^n for whole n in [-126, 127]
  M3_SIMD_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

  M3_SIMD_INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
  M3_SIMD_INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
  M3_SIMD_INLINE Vec as_floats(Words x) { return _mm512_castsi512_ps(x); }
  M3_SIMD_INLINE Words shift_left_16(Words x) { return _mm512_slli_epi32(x, 16); }
  M3_SIMD_INLINE Words high_halves(Words x) { return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
  M3_SIMD_INLINE Words either_words(Words a, Words b) { return _mm512_or_si512(a, b); }
  M3_SIMD_INLINE Words load_halves(const void* p) {  // 16-bit values, zero-extended
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }

  // In place: lane j of vector i becomes lane i of vector j.
  M3_SIMD_INLINE void transpose(Words* x) {
    Words t[16];
    for (int i = 0; i < 16; i += 4) {
      const Words a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
      const Words c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
      t[i] = _mm512_unpacklo_epi64(a, c);
      t[i + 1] = _mm512_unpackhi_epi64(a, c);
      t[i + 2] = _mm512_unpacklo_epi64(b, d);
      t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int j = 0; j < 4; ++j) {  // t[4 i + j] holds columns j, j+4, j+8, j+12 of rows 4i .. 4i+3
      const Words a = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88), b = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);
      const Words c = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88), d = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
      x[j] = _mm512_shuffle_i32x4(a, c, 0x88);
      x[j + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
      x[j + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
      x[j + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
  }
  // x[i] = word w + i of each of sixteen rows.
  M3_SIMD_INLINE void load_transposed(const void* const* rows, int w, Words* x) {
    for (int i = 0; i < 16; ++i) x[i] = load_words(static_cast<const uint32_t*>(rows[i]) + w);
    transpose(x);
  }
};

#elif defined(__AVX2__)

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 6, kTileVecs = 2;  // 12 of 16 registers accumulate
  using Vec = __m256;
  using Words = __m256i;
  using Mask = __m256;

  M3_SIMD_INLINE Vec zero() { return _mm256_setzero_ps(); }
  M3_SIMD_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
  M3_SIMD_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  M3_SIMD_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
  M3_SIMD_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  M3_SIMD_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  M3_SIMD_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  M3_SIMD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  M3_SIMD_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  M3_SIMD_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  M3_SIMD_INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
  M3_SIMD_INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  M3_SIMD_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
  M3_SIMD_INLINE Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  M3_SIMD_INLINE Vec scale_by_power(Vec x, Vec n) {  // n is added to the exponent
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), bits));
  }

  M3_SIMD_INLINE Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  M3_SIMD_INLINE void store_words(void* p, Words x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  M3_SIMD_INLINE Vec as_floats(Words x) { return _mm256_castsi256_ps(x); }
  M3_SIMD_INLINE Words shift_left_16(Words x) { return _mm256_slli_epi32(x, 16); }
  M3_SIMD_INLINE Words high_halves(Words x) { return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))); }
  M3_SIMD_INLINE Words either_words(Words a, Words b) { return _mm256_or_si256(a, b); }
  M3_SIMD_INLINE Words load_halves(const void* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }

  M3_SIMD_INLINE void transpose(Words* x) {
    Words t[8];
    for (int i = 0; i < 8; i += 4) {
      const Words a = _mm256_unpacklo_epi32(x[i], x[i + 1]), b = _mm256_unpackhi_epi32(x[i], x[i + 1]);
      const Words c = _mm256_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm256_unpackhi_epi32(x[i + 2], x[i + 3]);
      t[i] = _mm256_unpacklo_epi64(a, c);
      t[i + 1] = _mm256_unpackhi_epi64(a, c);
      t[i + 2] = _mm256_unpacklo_epi64(b, d);
      t[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
    for (int j = 0; j < 4; ++j) {  // t[4 i + j] holds columns j and j+4 of rows 4i .. 4i+3
      x[j] = _mm256_permute2x128_si256(t[j], t[4 + j], 0x20);
      x[j + 4] = _mm256_permute2x128_si256(t[j], t[4 + j], 0x31);
    }
  }
  // x[i] = word w + i of each of eight rows. Halves of rows j and j + 4 are joined while loading, which saves a
  // third of the shuffles.
  M3_SIMD_INLINE void load_transposed(const void* const* rows, int w, Words* x) {
    Words t[8];
    for (int half = 0; half < 2; ++half) {
      for (int j = 0; j < 4; ++j) {
        const auto* near = static_cast<const uint32_t*>(rows[j]) + w + 4 * half;
        const auto* far = static_cast<const uint32_t*>(rows[j + 4]) + w + 4 * half;
        t[4 * half + j] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(near))),
                                                  _mm_loadu_si128(reinterpret_cast<const __m128i*>(far)), 1);
      }
      const Words a = _mm256_unpacklo_epi32(t[4 * half], t[4 * half + 1]), b = _mm256_unpackhi_epi32(t[4 * half], t[4 * half + 1]);
      const Words c = _mm256_unpacklo_epi32(t[4 * half + 2], t[4 * half + 3]), d = _mm256_unpackhi_epi32(t[4 * half + 2], t[4 * half + 3]);
      x[4 * half] = _mm256_unpacklo_epi64(a, c);
      x[4 * half + 1] = _mm256_unpackhi_epi64(a, c);
      x[4 * half + 2] = _mm256_unpacklo_epi64(b, d);
      x[4 * half + 3] = _mm256_unpackhi_epi64(b, d);
    }
  }
};

#else  // plain vectors of 16 bytes, which every 64-bit CPU has; no fused multiply-add

struct Simd {
  static constexpr int kLanes = 4;
  static constexpr int kTileRows = 4, kTileVecs = 2;
  typedef float Vec __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));

  M3_SIMD_INLINE Vec zero() { return Vec{}; }
  M3_SIMD_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
  M3_SIMD_INLINE Vec load(const float* p) {
    Vec x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  M3_SIMD_INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }
  M3_SIMD_INLINE Vec add(Vec a, Vec b) { return a + b; }
  M3_SIMD_INLINE Vec sub(Vec a, Vec b) { return a - b; }
  M3_SIMD_INLINE Vec mul(Vec a, Vec b) { return a * b; }
  M3_SIMD_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  M3_SIMD_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b if either is NaN
  M3_SIMD_INLINE Mask less(Vec a, Vec b) { return a < b; }
  M3_SIMD_INLINE Mask either(Mask a, Mask b) { return a | b; }
  M3_SIMD_INLINE Mask both(Mask a, Mask b) { return a & b; }
  M3_SIMD_INLINE Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
  M3_SIMD_INLINE Vec round(Vec x) {  // to nearest even for |x| < 2^22, by pushing the fraction out
    const Vec big = set1(12582912.0f);
    return (x + big) - big;
  }
  M3_SIMD_INLINE Vec scale_by_power(Vec x, Vec n) {
    const Mask bits = __builtin_convertvector(n, Mask) << 23;
    return reinterpret_cast<Vec>(reinterpret_cast<Mask>(x) + bits);
  }

  M3_SIMD_INLINE Words load_words(const void* p) {
    Words x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  M3_SIMD_INLINE void store_words(void* p, Words x) { __builtin_memcpy(p, &x, sizeof(x)); }
  M3_SIMD_INLINE Vec as_floats(Words x) { return reinterpret_cast<Vec>(x); }
  M3_SIMD_INLINE Words shift_left_16(Words x) { return x << 16; }
  M3_SIMD_INLINE Words high_halves(Words x) { return x & 0xffff0000u; }
  M3_SIMD_INLINE Words either_words(Words a, Words b) { return a | b; }
  M3_SIMD_INLINE Words load_halves(const void* p) {
    uint16_t h[4];
    __builtin_memcpy(h, p, sizeof(h));
    return Words{h[0], h[1], h[2], h[3]};
  }

  M3_SIMD_INLINE void transpose(Words* x) {
    const Words a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
    const Words c = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    x[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
    x[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    x[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
    x[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
  }
  M3_SIMD_INLINE void load_transposed(const void* const* rows, int w, Words* x) {  // x[i] = word w + i of four rows
    for (int i = 0; i < 4; ++i) x[i] = load_words(static_cast<const uint32_t*>(rows[i]) + w);
    transpose(x);
  }
};

#endif

// Lanes 0, 1, 2, ...
M3_SIMD_INLINE Simd::Vec lane_numbers() {
  static constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Simd::load(kNumbers);
}

// Sum and maximum of the lanes, in a fixed order.
M3_SIMD_INLINE float reduce_add(Simd::Vec x) {
  float lane[Simd::kLanes];
  Simd::store(lane, x);
  for (int step = Simd::kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  }
  return lane[0];
}
M3_SIMD_INLINE float reduce_max(Simd::Vec x) {
  float lane[Simd::kLanes];
  Simd::store(lane, x);
  for (int step = Simd::kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
  }
  return lane[0];
}

// 2^x for x <= 127, 0 below -126 (exactly 0 for -inf), 1 for 0; NaN stays NaN. Relative error 1e-7: minimax
// polynomial of degree 6 on [-1/2, 1/2] (own Remez fit, 2e-9 before rounding), its constant set to 1.
M3_SIMD_INLINE Simd::Vec exp2_lanes(Simd::Vec x) {
  using V = Simd;
  const V::Vec lowest = V::set1(-126.0f);
  const V::Mask underflow = V::less(x, lowest);
  x = V::max(lowest, x);
  const V::Vec n = V::round(x), f = V::sub(x, n);
  V::Vec y = V::set1(1.5345812e-4f);
  y = V::fma(y, f, V::set1(1.3399931e-3f));
  y = V::fma(y, f, V::set1(9.6184890e-3f));
  y = V::fma(y, f, V::set1(5.5503288e-2f));
  y = V::fma(y, f, V::set1(2.4022647e-1f));
  y = V::fma(y, f, V::set1(6.9314721e-1f));
  y = V::fma(y, f, V::set1(1.0f));
  return V::select(underflow, V::zero(), V::scale_by_power(y, n));
}

}  // namespace
}  // namespace m3
