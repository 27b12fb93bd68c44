// Added tokens: text that becomes one id before the split pattern sees it (markers of the
// protocol).
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace m3 {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      // skipped by decode(skip_special); plays no part in matching
  bool normalized = false;   // matched in the second pass
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space behind it
  bool single_word = false;  // only where no word character touches it
};

// Finds the tokens of one pass in a text: leftmost, then longest.
class AddedTokenMatcher {
 public:
  void add(const AddedToken& token);
  bool empty() const { return tokens_.empty(); }

  // Cuts `text` (valid UTF-8) in order: the parts cover what is not dropped by lstrip and rstrip.
  struct Part {
    std::string_view text;
    const AddedToken* token;  // null pointer: ordinary text
  };
  // Nothing is found that touches one of the ascending ranges `plain`, which count from `offset` bytes before text.
  void cut(std::string_view text, std::vector<Part>& parts, std::span<const TextRange> plain = {},
           size_t offset = 0) const;

 private:
  struct Node {
    std::vector<std::pair<unsigned char, int>> children;  // sorted by byte
    int token = -1;
  };
  struct Match {
    size_t begin, end;
    const AddedToken* token;
  };
  int child(int node, unsigned char byte) const;
  std::optional<Match> find(std::string_view text, size_t from) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_{1};
  bool starts_[256] = {};  // bytes that begin a token
};

}  // namespace m3
