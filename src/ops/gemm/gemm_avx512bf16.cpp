// Pairs of bf16 products summed in fp32 (vdpbf16ps, which takes subnormal inputs as zero): a step is 32 consecutive
// k, lane i holds k = 2i and 2i + 1. 32 registers: 6 x 4 sums, 6 x, 1 w.
#include "ops/gemm/gemm_tiles.h"

namespace m3 {
namespace {

struct DotBf16 {
  using Elem = uint16_t;
  using Reg = __m512;  // 32 bf16 as bits, or 16 sums
  static constexpr int kMr = 6;
  static constexpr int kStep = 32;
  static constexpr int kTranspose = 8;
  static constexpr bool kFromF32 = false;
  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg load(const uint16_t* p) { return _mm512_loadu_ps(p); }
  static Reg dot(Reg a, Reg b, Reg c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  static Reg from(const uint16_t* p) { return _mm512_loadu_ps(p); }
  // Exact: e4m3 has 4 significant bits.
  static Reg from_e4m3(const uint8_t* p, float scale) {
    const __m256i low = upper_halves(_mm512_mul_ps(load_e4m3(p), _mm512_set1_ps(scale)));
    const __m256i high = upper_halves(_mm512_mul_ps(load_e4m3(p + 16), _mm512_set1_ps(scale)));
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  static void store(uint16_t* p, Reg r) { _mm512_storeu_ps(p, r); }

  static uint16_t from_one(uint16_t bits) { return bits; }
  // out[i][j] = src[j][first + i], of 16 bits each: interleave by 1, 2 and 4 elements.
  static void transpose(const uint16_t* const* src, int first, uint16_t* const* out) {
    __m128i r[8], t[8];
    for (int j = 0; j < 8; ++j)
      r[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src[j] + first));
    for (int j = 0; j < 4; ++j) {
      t[2 * j] = _mm_unpacklo_epi16(r[2 * j], r[2 * j + 1]);
      t[2 * j + 1] = _mm_unpackhi_epi16(r[2 * j], r[2 * j + 1]);
    }
    for (int half = 0; half < 8; half += 4) {
      r[half] = _mm_unpacklo_epi32(t[half], t[half + 2]);
      r[half + 1] = _mm_unpackhi_epi32(t[half], t[half + 2]);
      r[half + 2] = _mm_unpacklo_epi32(t[half + 1], t[half + 3]);
      r[half + 3] = _mm_unpackhi_epi32(t[half + 1], t[half + 3]);
    }
    for (int j = 0; j < 4; ++j) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[2 * j]), _mm_unpacklo_epi64(r[j], r[j + 4]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[2 * j + 1]),
                       _mm_unpackhi_epi64(r[j], r[j + 4]));
    }
  }

 private:
  static __m256i upper_halves(__m512 r) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(r), 16));
  }
};

}  // namespace

const GemmKernel kGemmAvx512Bf16 = make_gemm_kernel<DotBf16>();

}  // namespace m3
