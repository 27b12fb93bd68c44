// Inputs by rule: the numbers of tests/oracle/rule.py without storing them (SplitMix64, integer sums,
// one or two fp64 products, then rounding to fp32 and, where asked, to bf16).
#pragma once
#include <cstdint>

namespace m3::verify {

uint64_t rule_word(uint64_t seed, uint64_t index);
float rule_normal(uint64_t seed, uint64_t index, double std);  // fp32; round to bf16 afterwards
int64_t rule_integer(uint64_t seed, uint64_t index, int64_t low, int64_t high);  // inclusive

}  // namespace m3::verify
