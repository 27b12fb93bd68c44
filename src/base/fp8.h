// 8-bit numbers of MXFP8 checkpoints (model.md §11.0). Decoding only.
//   E4M3 (OCP "fn"): sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7f and 0xff are NaN; no infinity; largest 448
//   E8M0: 2^(byte - 127); 255 is NaN. A scale: the value of a weight is e4m3 * e8m0, multiplied, not divided.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace m3 {

inline constexpr int kMxBlock = 32;  // consecutive input columns that share one E8M0 scale

constexpr float e4m3_decode(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  float magnitude = 0;
  if (exponent == 15 && mantissa == 7) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-9f;  // subnormal
  } else {
    magnitude = std::bit_cast<float>(static_cast<uint32_t>((exponent + 120) << 23 | mantissa << 20));
  }
  return byte & 0x80 ? -magnitude : magnitude;
}

constexpr float e8m0_decode(uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  if (byte == 0) return 0x1p-127f;  // subnormal in fp32
  return std::bit_cast<float>(uint32_t{byte} << 23);
}

// The 256 values of E4M3, for loops that look up instead of computing.
inline constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values = {};
  for (int i = 0; i < 256; ++i) values[i] = e4m3_decode(static_cast<uint8_t>(i));
  return values;
}();

}  // namespace m3
