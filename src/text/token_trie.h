// The vocabulary as a tree of bytes, for computing masks: every token that begins with the same
// bytes is looked at once. Added tokens are left out: a grammar takes them by id only.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace m3 {

// Nodes in depth-first order; the root is node 0 and stands for no byte. Immutable.
class TokenTrie {
 public:
  explicit TokenTrie(const Tokenizer& tokenizer);

  // The bytes of a token of the tree; empty for added tokens and ids without one.
  std::string_view bytes(int32_t id) const {
    if (id < 0 || id >= num_tokens_) return {};
    const auto at = static_cast<size_t>(id);
    return std::string_view(text_).substr(starts_[at], starts_[at + 1] - starts_[at]);
  }

  int32_t num_tokens() const { return num_tokens_; }  // size of a mask in bits
  int32_t size() const { return static_cast<int32_t>(bytes_.size()); }
  uint8_t byte(int32_t node) const { return bytes_[static_cast<size_t>(node)]; }
  int32_t depth(int32_t node) const { return depths_[static_cast<size_t>(node)]; }
  int32_t end(int32_t node) const {
    return ends_[static_cast<size_t>(node)];
  }                                                      // behind the last descendant
  std::span<const int32_t> tokens(int32_t node) const {  // that end exactly here
    const auto at = static_cast<size_t>(node);
    return {ids_.data() + first_ids_[at], static_cast<size_t>(first_ids_[at + 1] - first_ids_[at])};
  }

 private:
  int32_t num_tokens_;
  std::string text_;            // bytes of all tokens, by id
  std::vector<size_t> starts_;  // by id, and the end
  std::vector<uint8_t> bytes_;
  std::vector<uint16_t> depths_;
  std::vector<int32_t> ends_, first_ids_, ids_;
};

}  // namespace m3
