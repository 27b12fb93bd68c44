// The passes of resize with AVX2: 32-bit integer sums, so the bytes equal those of the plain loops.
#include <immintrin.h>

#include <cstring>

#include "media/resize_kernels.h"

namespace m3::media {
namespace {

// Two RGB pixels at p as 32-bit lanes: (r g b x | r g b x). Reads 8 bytes.
inline __m256i load_two_pixels(const uint8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i spread = _mm_shuffle_epi8(raw, _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  return _mm256_cvtepu8_epi32(spread);
}

inline __m256i two_weights(const int32_t* w) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32(w[0])), _mm_set1_epi32(w[1]), 1);
}

inline __m256i round_sums(__m256i sum) {
  return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(1 << (kWeightBits - 1))), kWeightBits);
}

}  // namespace

void resize_row_avx2(const ResizeAxis& axis, const uint8_t* in, int in_width, uint8_t* out) {
  for (int i = 0; i < axis.out; ++i) {
    const int32_t* weights = axis.weights.data() + static_cast<size_t>(i) * axis.max_taps;
    const int first = axis.first[i], count = axis.count[i];
    const uint8_t* pixel = in + 3 * static_cast<size_t>(first);
    // A load takes 8 bytes for 6: it must end before the row does, so three pixels must be left.
    const int safe = in_width - first - 2;
    __m256i sum = _mm256_setzero_si256();
    int k = 0;
    for (; k + 2 <= count && k < safe; k += 2) {
      sum = _mm256_add_epi32(sum, _mm256_mullo_epi32(load_two_pixels(pixel + 3 * k), two_weights(weights + k)));
    }
    alignas(16) int32_t lanes[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes),
                    _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
    for (; k < count; ++k) {
      for (int c = 0; c < 3; ++c) lanes[c] += weights[k] * pixel[3 * k + c];
    }
    for (int c = 0; c < 3; ++c) out[3 * i + c] = round_to_byte(lanes[c]);
  }
}

void blend_rows_avx2(const int32_t* weights, int num_taps, const uint8_t* in, int64_t stride, int64_t bytes, uint8_t* out) {
  int64_t x = 0;
  for (; x + 16 <= bytes; x += 16) {
    __m256i low = _mm256_setzero_si256(), high = low;
    for (int k = 0; k < num_taps; ++k) {
      const __m256i w = _mm256_set1_epi32(weights[k]);
      const uint8_t* p = in + k * stride + x;
      low = _mm256_add_epi32(low, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), w));
      high = _mm256_add_epi32(high, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))), w));
    }
    // 32 to 16 to 8 bits with saturation; packs works on 128-bit halves, the permutation restores order.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(round_sums(low), round_sums(high)), 0xd8);
    const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x), packed);
  }
  if (x < bytes) blend_rows_ref(weights, num_taps, in + x, stride, bytes - x, out + x);
}

}  // namespace m3::media
