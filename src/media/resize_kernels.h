// Inside of resize: the two passes over raw memory. Every implementation gives the same bytes: sums are
// integers.
#pragma once
#include <cstdint>
#include <vector>

namespace m3::media {

// One axis: output i is the sum over k of weights[i * max_taps + k] * input[first[i] + k], k < count[i],
// in 22-bit fixed point, rounded and clipped to a byte.
struct ResizeAxis {
  int out = 0, max_taps = 0;
  std::vector<int32_t> first, count, weights;
};

inline constexpr int kWeightBits = 22;

inline uint8_t round_to_byte(int32_t sum) {
  const int32_t v = (sum + (1 << (kWeightBits - 1))) >> kWeightBits;
  return static_cast<uint8_t>(v < 0 ? 0 : v > 255 ? 255 : v);
}

// One row of RGB pixels, in_width wide, to axis.out pixels.
void resize_row_ref(const ResizeAxis& axis, const uint8_t* in, int in_width, uint8_t* out);
void resize_row_avx2(const ResizeAxis& axis, const uint8_t* in, int in_width, uint8_t* out);
// `bytes` columns: out[x] from num_taps rows that start at `in`, `stride` bytes apart.
void blend_rows_ref(const int32_t* weights, int num_taps, const uint8_t* in, int64_t stride, int64_t bytes, uint8_t* out);
void blend_rows_avx2(const int32_t* weights, int num_taps, const uint8_t* in, int64_t stride, int64_t bytes, uint8_t* out);

}  // namespace m3::media
