#include "text/token_trie.h"

#include <algorithm>

#include "base/check.h"

namespace m3 {

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : num_tokens_(tokenizer.size()) {
  constexpr size_t kMaxDepth = UINT16_MAX;
  std::vector<std::pair<std::string_view, int32_t>> tokens;
  for (int32_t id = 0; id < num_tokens_; ++id) {
    starts_.push_back(text_.size());
    if (tokenizer.is_added(id)) continue;
    const std::string_view bytes = tokenizer.bytes(id);
    M3_CHECK(bytes.size() < kMaxDepth, "token {} has {} bytes, want fewer than {}", id,
             bytes.size(), kMaxDepth);
    text_ += bytes;
    if (!bytes.empty()) tokens.emplace_back(bytes, id);
  }
  starts_.push_back(text_.size());
  std::sort(tokens.begin(), tokens.end());

  std::vector<int32_t> path;  // nodes from the root to the last token
  const auto add_node = [&](uint8_t byte) {
    bytes_.push_back(byte);
    depths_.push_back(static_cast<uint16_t>(path.size()));
    ends_.push_back(0);
    first_ids_.push_back(static_cast<int32_t>(ids_.size()));
    path.push_back(static_cast<int32_t>(bytes_.size()) - 1);
  };
  const auto leave = [&](size_t depth) {
    for (; path.size() > depth + 1; path.pop_back())
      ends_[static_cast<size_t>(path.back())] = static_cast<int32_t>(bytes_.size());
  };
  add_node(0);
  std::string_view previous;
  for (const auto& [bytes, id] : tokens) {
    const size_t shared = static_cast<size_t>(
        std::mismatch(bytes.begin(), bytes.end(), previous.begin(), previous.end()).first -
        bytes.begin());
    leave(shared);
    for (size_t i = shared; i < bytes.size(); ++i) add_node(static_cast<uint8_t>(bytes[i]));
    ids_.push_back(id);
    previous = bytes;
  }
  leave(0);
  ends_[0] = static_cast<int32_t>(bytes_.size());
  first_ids_.push_back(static_cast<int32_t>(ids_.size()));
}

}  // namespace m3
