// bfloat16 storage type. Arithmetic happens in float; rounding is to nearest, ties to even.
#pragma once
#include <bit>
#include <cstdint>

namespace m3 {

struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(float value) : bits(round(value)) {}
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }

  static uint16_t round(float value) {
    uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);  // quiet NaN
    u += 0x7fffu + ((u >> 16) & 1);
    return static_cast<uint16_t>(u >> 16);
  }
};
static_assert(sizeof(bf16) == 2);

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return static_cast<float>(value); }

}  // namespace m3
