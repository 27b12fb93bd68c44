#include "text/json_schema_numbers.h"

#include <algorithm>
#include <charconv>

#include "base/check.h"

namespace m3 {

using Part = GrammarBuilder::Part;

namespace {

constexpr int kMaxWhole = 18, kMaxFraction = 17;
constexpr int64_t kMaxMagnitude = 999'999'999'999'999'999;

// The absolute value of a bound: whole part and fraction without trailing zeros.
struct Magnitude {
  int64_t whole = 0;
  std::string fraction;
  bool inclusive = true;
  bool is_zero() const { return whole == 0 && fraction.empty(); }
};

Magnitude magnitude_of(const NumberBound& bound) {
  // Python's spelling: digits, perhaps a point, perhaps an exponent.
  std::string digits = bound.value.text();
  if (digits.starts_with('-')) digits.erase(0, 1);
  int exponent = 0;
  if (const size_t e = digits.find('e'); e != digits.npos) {
    std::from_chars(digits.data() + e + (digits[e + 1] == '+' ? 2 : 1),
                    digits.data() + digits.size(), exponent);
    digits.resize(e);
  }
  size_t point = std::min(digits.find('.'), digits.size());
  if (point < digits.size()) digits.erase(point, 1);
  const int64_t whole_digits = static_cast<int64_t>(point) + exponent;
  M3_CHECK(whole_digits <= kMaxWhole, "the bound {} is too large", bound.value.text());
  if (whole_digits < 0) digits.insert(0, static_cast<size_t>(-whole_digits), '0');
  point = static_cast<size_t>(std::max<int64_t>(whole_digits, 0));
  if (digits.size() < point) digits.append(point - digits.size(), '0');
  Magnitude out;
  out.inclusive = bound.inclusive;
  out.fraction = digits.substr(point);
  std::from_chars(digits.data(), digits.data() + point, out.whole);
  while (out.fraction.ends_with('0')) out.fraction.pop_back();
  M3_CHECK(out.fraction.size() <= kMaxFraction, "the bound {} has more than {} decimals",
           bound.value.text(), kMaxFraction);
  return out;
}

bool is_negative(const NumberBound& bound) {
  return bound.value.text().starts_with('-');
}

class NumberWriter {
 public:
  NumberWriter(GrammarBuilder& builder, bool integers) : builder_(builder), integers_(integers) {}

  // Values of [low, high], both not negative.
  Part between(const Magnitude& low, const Magnitude& high) {
    if (low.whole > high.whole) return builder_.nothing();
    std::vector<Part> parts;
    if (low.whole + 1 <= high.whole - 1) {
      parts.push_back(builder_.sequence(
          {whole(low.whole + 1, high.whole - 1), fraction(low, high, false, false)}));
    }
    const bool same = low.whole == high.whole;
    parts.push_back(builder_.sequence(
        {builder_.literal(std::to_string(low.whole)), fraction(low, high, true, same)}));
    if (!same)
      parts.push_back(builder_.sequence(
          {builder_.literal(std::to_string(high.whole)), fraction(low, high, false, true)}));
    return builder_.either(parts);
  }

 private:
  Part digit(int low, int high) {
    return builder_.bytes(static_cast<uint8_t>('0' + low), static_cast<uint8_t>('0' + high));
  }

  Part whole(int64_t low, int64_t high) {
    std::vector<Part> parts;
    int64_t first = 0, last = 9;  // of the numbers with as many digits
    for (int digits = 1; digits <= kMaxWhole; ++digits) {
      const int64_t from = std::max(low, first), to = std::min(high, last);
      if (from <= to)
        parts.push_back(same_length(std::to_string(from), std::to_string(to), true, true));
      first = last + 1;
      if (digits < kMaxWhole) last = last * 10 + 9;
    }
    return builder_.either(parts);
  }

  // Digits between two strings of one length. A bound is tight while all digits before were its
  // own.
  Part same_length(std::string_view low, std::string_view high, bool low_tight, bool high_tight) {
    if (low.empty()) return builder_.empty();
    const auto rest = [&](bool low_rest, bool high_rest) {
      return same_length(low.substr(1), high.substr(1), low_rest, high_rest);
    };
    return step(low_tight ? low[0] - '0' : 0, high_tight ? high[0] - '0' : 9, low_tight, high_tight,
                rest);
  }

  // One digit from low to high and what follows it, by whether the bounds stay tight.
  template <typename Rest>
  Part step(int low, int high, bool low_tight, bool high_tight, Rest rest) {
    std::vector<Part> parts;
    if (low == high && low_tight && high_tight)
      return builder_.sequence({digit(low, high), rest(true, true)});
    if (low > high) return builder_.nothing();
    if (low_tight) {
      parts.push_back(builder_.sequence({digit(low, low), rest(true, high_tight && low == high)}));
      ++low;
    }
    if (high_tight && low <= high) {
      parts.push_back(builder_.sequence({digit(high, high), rest(false, true)}));
      --high;
    }
    if (low <= high) parts.push_back(builder_.sequence({digit(low, high), rest(false, false)}));
    return builder_.either(parts);
  }

  // What follows a whole part that equals the bounds' own where they are tight.
  Part fraction(const Magnitude& low, const Magnitude& high, bool low_tight, bool high_tight) {
    std::vector<Part> parts;
    if (may_end(low, high, 0, low_tight, high_tight)) parts.push_back(builder_.empty());
    if (!integers_)
      parts.push_back(builder_.sequence(
          {builder_.literal("."), decimals(low, high, 0, low_tight, high_tight)}));
    return builder_.either(parts);
  }

  static bool may_end(const Magnitude& low, const Magnitude& high, size_t i, bool low_tight,
                      bool high_tight) {
    const bool above = !low_tight || (i >= low.fraction.size() && low.inclusive);
    const bool below = !high_tight || i < high.fraction.size() || high.inclusive;
    return above && below;
  }

  Part decimals(const Magnitude& low, const Magnitude& high, size_t i, bool low_tight,
                bool high_tight) {
    if (low_tight && i >= low.fraction.size() && low.inclusive)
      low_tight = false;  // anything from here is above
    std::vector<Part> parts;
    if (!low_tight && !high_tight) {
      return builder_.repeat([&] { return digit(0, 9); }, i == 0 ? 1 : 0,
                             kMaxFraction - static_cast<int64_t>(i));
    }
    if (i > 0 && may_end(low, high, i, low_tight, high_tight)) parts.push_back(builder_.empty());
    if (i < kMaxFraction) {
      const auto digit_of = [&](const Magnitude& bound) {
        return i < bound.fraction.size() ? bound.fraction[i] - '0' : 0;
      };
      const auto rest = [&](bool low_rest, bool high_rest) {
        return decimals(low, high, i + 1, low_rest, high_rest);
      };
      parts.push_back(step(low_tight ? digit_of(low) : 0, high_tight ? digit_of(high) : 9,
                           low_tight, high_tight, rest));
    }
    return builder_.either(parts);
  }

  GrammarBuilder& builder_;
  bool integers_;
};

Part any_number(GrammarBuilder& builder, bool integers) {
  const auto digit = [&] { return builder.bytes('0', '9'); };
  const auto digits = [&](int64_t min, int64_t max) { return builder.repeat(digit, min, max); };
  std::vector<Part> parts = {
      builder.optional(builder.literal("-")),
      builder.either({builder.literal("0"),
                      builder.sequence({builder.bytes('1', '9'), digits(0, kMaxWhole - 1)})})};
  if (!integers) {
    parts.push_back(
        builder.optional(builder.sequence({builder.literal("."), digits(1, kMaxFraction)})));
    const Part sign =
        builder.optional(builder.either({builder.literal("+"), builder.literal("-")}));
    const Part e = builder.either({builder.literal("e"), builder.literal("E")});
    parts.push_back(builder.optional(builder.sequence({e, sign, digits(1, 2)})));
  }
  return builder.sequence(parts);
}

}  // namespace

Part grammar_number(GrammarBuilder& builder, const NumberRange& range) {
  if (!range.low && !range.high) return any_number(builder, range.integers);
  NumberWriter writer(builder, range.integers);
  const Magnitude zero{0, "", true}, above_zero{0, "", false}, huge{kMaxMagnitude, "", true};
  std::vector<Part> parts;
  if (!range.high || !is_negative(*range.high)) {
    const Magnitude low = range.low && !is_negative(*range.low) ? magnitude_of(*range.low) : zero;
    parts.push_back(writer.between(low, range.high ? magnitude_of(*range.high) : huge));
  }
  if (!range.low || is_negative(*range.low)) {
    const Magnitude low =
        range.high && is_negative(*range.high) ? magnitude_of(*range.high) : above_zero;
    const Magnitude high = range.low ? magnitude_of(*range.low) : huge;
    parts.push_back(builder.sequence({builder.literal("-"), writer.between(low, high)}));
  }
  return builder.either(parts);
}

}  // namespace m3
