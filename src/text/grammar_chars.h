// Sets of characters as grammar fragments, as they are or as they may stand inside a JSON string.
#pragma once
#include <vector>

#include "text/grammar_machine.h"

namespace m3 {

// Unicode scalar values (no surrogates), as sorted ranges that do not touch.
class CharSet {
 public:
  struct Range {
    uint32_t low, high;
    bool operator==(const Range&) const = default;
  };
  CharSet() = default;
  CharSet(std::initializer_list<Range> ranges) {
    for (const Range& range : ranges) add(range);
  }
  void add(Range range);
  void add(const CharSet& other) {
    for (const Range& range : other.ranges_) add(range);
  }
  CharSet inverted() const;
  const std::vector<Range>& ranges() const { return ranges_; }
  static CharSet all() { return {{0, 0x10FFFF}}; }

 private:
  std::vector<Range> ranges_;
};

enum class CharForm {
  kRaw,         // UTF-8
  kJsonString,  // inside the quotes of a JSON string: quotes, backslashes and controls are escaped
};

// One character of the set.
GrammarBuilder::Part grammar_char(GrammarBuilder& builder, const CharSet& set, CharForm form);

// Any character of a JSON string, as itself or escaped. \u escapes (scalar values only) more than
// double the states, so that counted strings go without.
enum class UnicodeEscapes { kNo, kYes };
GrammarBuilder::Part grammar_json_char(GrammarBuilder& builder, UnicodeEscapes unicode_escapes);

}  // namespace m3
