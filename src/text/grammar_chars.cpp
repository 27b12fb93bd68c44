#include "text/grammar_chars.h"

#include <algorithm>
#include <array>

#include "text/json_value.h"
#include "text/utf8.h"

namespace m3 {

using Part = GrammarBuilder::Part;

namespace {

constexpr uint32_t kLastChar = 0x10FFFF, kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;

// What a JSON string holds only in escaped form, in order.
constexpr auto kEscaped = [] {
  std::array<uint32_t, 0x22> all{};
  for (uint32_t i = 0; i < 0x20; ++i) all[i] = i;
  all[0x20] = '"';
  all[0x21] = '\\';
  return all;
}();

std::string utf8(uint32_t character) {
  std::string text;
  append_utf8(character, text);
  return text;
}

// Ranges of characters as sequences of byte ranges between two nodes. Sequences that end in whole
// continuation bytes share those, which keeps counted strings small.
class Utf8Writer {
 public:
  explicit Utf8Writer(GrammarBuilder& builder)
      : builder_(builder), all_(builder.nothing()), tails_{all_.end} {}

  // Cuts the range into pieces of one length whose byte ranges are independent of each other.
  void add(uint32_t low, uint32_t high) {
    for (uint32_t last : {0x7Fu, 0x7FFu, 0xFFFFu}) {  // last characters of 1, 2 and 3 bytes
      if (low <= last && high > last) {
        add(low, last);
        return add(last + 1, high);
      }
    }
    for (int shift : {6, 12, 18}) {  // groups of 64, 64^2 and 64^3 characters
      const uint32_t rest = (uint32_t{1} << shift) - 1;
      if (low <= 0x7F || low >> shift == high >> shift) break;
      if ((low & rest) != 0) {
        add(low, low | rest);
        return add((low | rest) + 1, high);
      }
      if ((high & rest) != rest) {
        add(low, (high & ~rest) - 1);
        return add(high & ~rest, high);
      }
    }
    add_piece(utf8(low), utf8(high));
  }

  Part done() const { return all_; }

 private:
  void add_piece(const std::string& from, const std::string& to) {
    size_t num_whole = 0;  // continuation bytes at the end that may be anything
    while (num_whole + 1 < from.size() && from[from.size() - 1 - num_whole] == '\x80' &&
           to[to.size() - 1 - num_whole] == '\xBF') {
      ++num_whole;
    }
    int at = all_.begin;
    for (size_t i = 0; i + num_whole < from.size(); ++i) {
      const bool is_last = i + num_whole + 1 == from.size();
      const int next = is_last ? tail(num_whole) : builder_.add_node();
      builder_.link_bytes(at, static_cast<uint8_t>(from[i]), static_cast<uint8_t>(to[i]), next);
      at = next;
    }
  }

  // The node from which `count` continuation bytes lead to the end.
  int tail(size_t count) {
    while (tails_.size() <= count) {
      const int node = builder_.add_node();
      builder_.link_bytes(node, 0x80, 0xBF, tails_.back());
      tails_.push_back(node);
    }
    return tails_[count];
  }

  GrammarBuilder& builder_;
  Part all_;
  std::vector<int> tails_;
};

Part hex_digits(GrammarBuilder& builder, int count) {
  std::vector<Part> digits;
  for (int i = 0; i < count; ++i) {
    digits.push_back(builder.either(
        {builder.bytes('0', '9'), builder.bytes('a', 'f'), builder.bytes('A', 'F')}));
  }
  return builder.sequence(digits);
}

Part either_byte(GrammarBuilder& builder, std::string_view bytes) {
  std::vector<Part> parts;
  for (char c : bytes) parts.push_back(builder.literal(std::string_view(&c, 1)));
  return builder.either(parts);
}

}  // namespace

void CharSet::add(Range range) {
  range.high = std::min(range.high, kLastChar);
  if (range.low <= kLastSurrogate && range.high >= kFirstSurrogate) {
    if (range.low < kFirstSurrogate) add({range.low, kFirstSurrogate - 1});
    if (range.high > kLastSurrogate) add({kLastSurrogate + 1, range.high});
    return;
  }
  if (range.low > range.high) return;
  ranges_.push_back(range);
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.low < b.low; });
  std::vector<Range> merged;
  for (const Range& next : ranges_) {
    if (!merged.empty() && next.low <= merged.back().high + 1) {
      merged.back().high = std::max(merged.back().high, next.high);
    } else {
      merged.push_back(next);
    }
  }
  ranges_ = std::move(merged);
}

CharSet CharSet::inverted() const {
  CharSet out;
  uint32_t low = 0;
  for (const Range& range : ranges_) {
    if (range.low > low) out.add({low, range.low - 1});
    low = range.high + 1;
  }
  if (low <= kLastChar) out.add({low, kLastChar});
  return out;
}

Part grammar_char(GrammarBuilder& builder, const CharSet& set, CharForm form) {
  Utf8Writer writer(builder);
  std::vector<Part> escaped;  // what must be escaped in a JSON string has its shortest spelling
  for (const CharSet::Range& range : set.ranges()) {
    uint32_t low = range.low;
    for (const uint32_t special : kEscaped) {
      if (form != CharForm::kJsonString || special < low || special > range.high) continue;
      if (special > low) writer.add(low, special - 1);
      std::string spelling;
      json_escape(utf8(special), spelling);
      escaped.push_back(builder.literal(spelling));
      low = special + 1;
    }
    if (low <= range.high) writer.add(low, range.high);
  }
  if (escaped.empty()) return writer.done();
  escaped.push_back(writer.done());
  return builder.either(escaped);
}

Part grammar_json_char(GrammarBuilder& builder, UnicodeEscapes unicode_escapes) {
  std::vector<Part> escapes = {either_byte(builder, "\"\\/bfnrt")};
  if (unicode_escapes == UnicodeEscapes::kYes) {
    const auto unit = [&](std::string_view first, Part second, int rest) {
      return builder.sequence(
          {builder.literal("u"), either_byte(builder, first), second, hex_digits(builder, rest)});
    };
    escapes.push_back(unit("0123456789abcefABCEF", hex_digits(builder, 1), 2));
    escapes.push_back(unit("dD", builder.bytes('0', '7'), 2));
    escapes.push_back(
        builder.sequence({unit("dD", either_byte(builder, "89abAB"), 2), builder.literal("\\"),
                          unit("dD", either_byte(builder, "cdefCDEF"), 2)}));
  }
  const CharSet plain = CharSet({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}).inverted();
  return builder.either({grammar_char(builder, plain, CharForm::kRaw),
                         builder.sequence({builder.literal("\\"), builder.either(escapes)})});
}

}  // namespace m3
