#include "train/data/split.h"

#include <fmt/core.h>

#include "base/sha256.h"

namespace m3::data {

double item_fraction(std::string_view item, uint64_t seed) {
  return static_cast<double>(sha256_u64(fmt::format("{}:{}", seed, item)) >> 11) * 0x1.0p-53;
}

Split split_of(std::string_view item, const SplitRule& rule) {
  const double u = item_fraction(item, rule.seed);
  if (u < rule.test) return Split::kTest;
  return u < rule.test + rule.valid ? Split::kValid : Split::kTrain;
}

}  // namespace m3::data
