// Drafts without extra weights: what followed the last time the sequence's newest tokens stood together.
#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>

namespace m3 {

class PromptLookup {
 public:
  static constexpr int kMatchTokens = 3;

  // `tokens`: the whole sequence so far; each call's begins with that of the call before. At most `max_tokens` that
  // may come next, a view into `tokens`; empty where the newest kMatchTokens never stood together before.
  std::span<const int32_t> draft(std::span<const int32_t> tokens, int64_t max_tokens);

 private:
  size_t num_indexed_ = kMatchTokens;  // ends of the n-grams in the table are below this
  std::unordered_map<uint64_t, size_t> end_of_;
};

}  // namespace m3
