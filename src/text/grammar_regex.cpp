#include "text/grammar_regex.h"

#include <cctype>

#include "base/check.h"
#include "text/utf8.h"

namespace m3 {

using Part = GrammarBuilder::Part;

namespace {

constexpr int kMaxRepeat = 1000, kMaxNesting = 100;

class RegexReader {
 public:
  RegexReader(GrammarBuilder& builder, std::string_view pattern, const RegexOptions& options)
      : builder_(builder), pattern_(pattern), options_(options) {
    M3_CHECK(utf8_find_invalid(pattern) == pattern.npos, "the pattern is not valid UTF-8");
  }

  Part read() {
    const Part part = alternatives(0);
    if (at_ < pattern_.size()) refuse("an unmatched )");
    return part;
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    M3_FAIL("the pattern '{}' has {} at byte {}, which is not supported", pattern_, what, at_);
  }
  bool more() const { return at_ < pattern_.size(); }
  char peek() const { return more() ? pattern_[at_] : '\0'; }
  bool take(std::string_view text) {
    if (!pattern_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  uint32_t take_char() {
    const std::string_view text = pattern_.substr(at_);
    at_ += utf8_step(text).length;
    return read_utf8(text);
  }

  // Each alternative of the outermost level may begin with ^ and end with $; where it does not and
  // the pattern need not match the whole text, anything may stand there.
  Part alternatives(int depth) {
    if (depth > kMaxNesting) refuse("too many nested groups");
    std::vector<Part> parts;
    do {
      const bool is_open = depth == 0 && !options_.whole;
      const bool has_start = depth == 0 && take("^");
      Part part = sequence(depth);
      const bool has_end = depth == 0 && take("$");
      if (is_open && !has_start) part = builder_.sequence({anything(), part});
      if (is_open && !has_end) part = builder_.sequence({part, anything()});
      parts.push_back(part);
    } while (take("|"));
    return parts.size() == 1 ? parts[0] : builder_.either(parts);
  }

  Part anything() {
    return builder_.repeat([&] { return grammar_char(builder_, CharSet::all(), options_.form); }, 0,
                           -1);
  }

  Part sequence(int depth) {
    std::vector<Part> parts;
    while (more() && peek() != '|' && peek() != ')') {
      if (depth == 0 && peek() == '$' && (at_ + 1 == pattern_.size() || pattern_[at_ + 1] == '|'))
        break;
      parts.push_back(repeated(depth));
    }
    return builder_.sequence(parts);
  }

  Part repeated(int depth) {
    const size_t start = at_;
    const Part once = atom(depth);
    Part all = once;
    if (take("*")) {
      all = builder_.optional(builder_.loop(once));
    } else if (take("+")) {
      all = builder_.loop(once);
    } else if (take("?")) {
      all = builder_.optional(once);
    } else if (peek() == '{') {
      all = counted(start, depth);
    } else {
      return once;
    }
    take("?");  // lazy: the same language
    if (std::string_view("*+?{").find(peek()) != std::string_view::npos && more())
      refuse("a possessive or repeated quantifier");
    return all;
  }

  // The atom at `start` is read anew for each copy.
  Part counted(size_t start, int depth) {
    int64_t min = 0, max = 0;
    read_bounds(min, max);
    const size_t behind = at_;
    const Part all = builder_.repeat(
        [&] {
          at_ = start;
          return atom(depth);
        },
        min, max);
    at_ = behind;
    return all;
  }

  int64_t number() {
    int64_t value = -1;
    for (; peek() >= '0' && peek() <= '9' && value <= kMaxRepeat; ++at_)
      value = std::max<int64_t>(value, 0) * 10 + peek() - '0';
    if (value > kMaxRepeat) refuse("a repetition above 1000");
    return value;
  }

  void read_bounds(int64_t& min, int64_t& max) {
    take("{");
    min = number();
    max = min;
    if (take(",")) max = number();
    if (min < 0 || (max >= 0 && max < min) || !take("}")) refuse("a malformed repetition");
  }

  Part atom(int depth) {
    if (take("(")) {
      if (take("?")) {
        if (!take(":")) refuse("a look-around, a named group or an option");
      }
      const Part inside = alternatives(depth + 1);
      if (!take(")")) refuse("a group that is not closed");
      return inside;
    }
    if (std::string_view("*+?{").find(peek()) != std::string_view::npos)
      refuse("a quantifier with nothing before it");
    if (peek() == '^' || peek() == '$') refuse("an anchor inside");
    CharSet set;
    if (take("[")) {
      set = char_class();
    } else if (take(".")) {
      set = CharSet({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}).inverted();
    } else if (take("\\")) {
      set = escape();
    } else {
      const uint32_t character = take_char();
      set = {{character, character}};
    }
    if (set.ranges().empty()) refuse("a class without characters");
    return grammar_char(builder_, set, options_.form);
  }

  CharSet char_class() {
    const bool invert = take("^");
    CharSet set;
    while (!take("]")) {
      if (!more()) refuse("a class that is not closed");
      CharSet item = class_item();
      if (peek() == '-' && at_ + 1 < pattern_.size() && pattern_[at_ + 1] != ']') {
        take("-");
        const CharSet last = class_item();
        if (!is_single(item) || !is_single(last) || item.ranges()[0].low > last.ranges()[0].low)
          refuse("a malformed range");
        item = {{item.ranges()[0].low, last.ranges()[0].low}};
      }
      set.add(item);
    }
    return invert ? set.inverted() : set;
  }

  static bool is_single(const CharSet& set) {
    return set.ranges().size() == 1 && set.ranges()[0].low == set.ranges()[0].high;
  }

  CharSet class_item() {
    if (take("\\")) {
      if (take("b")) return {{'\b', '\b'}};
      return escape();
    }
    if (peek() == '[') refuse("a [ inside a class");
    const uint32_t character = take_char();
    return {{character, character}};
  }

  uint32_t hex(size_t count) {
    uint32_t value = 0;
    for (size_t i = 0; i < count; ++i, ++at_) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) refuse("a malformed escape");
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
  }

  CharSet escape() {
    const CharSet digits = {{'0', '9'}};
    const CharSet word = {{'a', 'z'}, {'A', 'Z'}, {'0', '9'}, {'_', '_'}};
    const CharSet space = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                           {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                           {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    if (!more()) refuse("a \\ at the end");
    if (take("d")) return digits;
    if (take("D")) return digits.inverted();
    if (take("w")) return word;
    if (take("W")) return word.inverted();
    if (take("s")) return space;
    if (take("S")) return space.inverted();
    uint32_t character = 0;
    if (take("x")) {
      character = hex(2);
    } else if (take("u{")) {
      const size_t end = pattern_.find('}', at_);
      if (end == pattern_.npos || end - at_ > 6) refuse("a malformed escape");
      character = hex(end - at_);
      take("}");
    } else if (take("u")) {
      character = hex(4);
    } else {
      constexpr std::string_view kNames = "tnrfv0", kValues("\t\n\r\f\v\0", 6);
      const char c = peek();
      const size_t name = kNames.find(c);
      const bool is_punctuation =
          c > ' ' && c < 0x7F && !std::isalnum(static_cast<unsigned char>(c));
      if (name == kNames.npos && !is_punctuation) refuse("an escape of this kind");
      character = static_cast<uint8_t>(name == kNames.npos ? c : kValues[name]);
      ++at_;
    }
    if (character > 0x10FFFF || (character >= 0xD800 && character <= 0xDFFF)) refuse("a surrogate");
    return {{character, character}};
  }

  GrammarBuilder& builder_;
  std::string_view pattern_;
  RegexOptions options_;
  size_t at_ = 0;
};

}  // namespace

Part grammar_regex(GrammarBuilder& builder, std::string_view pattern, const RegexOptions& options) {
  return RegexReader(builder, pattern, options).read();
}

}  // namespace m3
