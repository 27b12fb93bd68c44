#include "engine/prompt_lookup.h"

#include <algorithm>

namespace m3 {

namespace {

// Three ids of at most 21 bits fit one word exactly, so equal keys are equal n-grams.
static_assert(PromptLookup::kMatchTokens == 3);
uint64_t ngram(std::span<const int32_t> tokens, size_t end) {
  return static_cast<uint64_t>(tokens[end - 3]) << 42 | static_cast<uint64_t>(tokens[end - 2]) << 21 |
         static_cast<uint64_t>(tokens[end - 1]);
}

}  // namespace

std::span<const int32_t> PromptLookup::draft(std::span<const int32_t> tokens, int64_t max_tokens) {
  if (tokens.size() <= kMatchTokens) return {};
  for (; num_indexed_ < tokens.size(); ++num_indexed_) end_of_[ngram(tokens, num_indexed_)] = num_indexed_;
  const auto found = end_of_.find(ngram(tokens, tokens.size()));
  if (found == end_of_.end()) return {};
  const auto rest = tokens.subspan(found->second);
  return rest.first(std::min<size_t>(rest.size(), std::max<int64_t>(max_tokens, 0)));
}

}  // namespace m3
