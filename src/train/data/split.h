// Splits by item (training.md §17): an item, with all its documents, belongs to one split for ever, whatever
// else is in the corpus.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace m3::data {

enum class Split { kTrain, kValid, kTest };
inline constexpr std::array<const char*, 3> kSplitNames = {"train", "valid", "test"};
inline const char* split_name(Split split) { return kSplitNames[static_cast<int>(split)]; }

struct SplitRule {
  uint64_t seed = 0;
  double valid = 0.05, test = 0.05;  // shares; the rest is for training
};

// A uniform number in [0, 1) that depends on the item and the seed alone.
double item_fraction(std::string_view item, uint64_t seed);
Split split_of(std::string_view item, const SplitRule& rule);

}  // namespace m3::data
