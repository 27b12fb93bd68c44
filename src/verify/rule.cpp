#include "verify/rule.h"

namespace m3::verify {

uint64_t rule_word(uint64_t seed, uint64_t index) {
  uint64_t z = ((seed << 40) + index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

float rule_normal(uint64_t seed, uint64_t index, double std) {
  const uint64_t w = rule_word(seed, index);
  const int64_t sum = static_cast<int64_t>((w & 0xFFFF) + (w >> 16 & 0xFFFF) + (w >> 32 & 0xFFFF) + (w >> 48));
  constexpr double kScale = 0x1.bb67ae8584caap-16;  // sqrt(3) / 65536
  double x = static_cast<double>(sum - 131070) * kScale;
  if (std != 1.0) x *= std;
  return static_cast<float>(x);
}

int64_t rule_integer(uint64_t seed, uint64_t index, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rule_word(seed, index) % static_cast<uint64_t>(high - low + 1));
}

}  // namespace m3::verify
