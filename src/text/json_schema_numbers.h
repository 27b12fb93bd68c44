// Numbers within bounds as grammar fragments.
#pragma once
#include <optional>

#include "text/grammar_machine.h"
#include "text/json_value.h"

namespace m3 {

struct NumberBound {
  JsonValue value;  // a number
  bool inclusive = true;
};
struct NumberRange {
  std::optional<NumberBound> low, high;
  bool integers = false;
};

// JSON numbers of the range, without an exponent where there are bounds. Whole parts have at most
// 18 digits and fractions 17, so that every number fits a double or 64 bits. Throws Error if a
// bound has more.
GrammarBuilder::Part grammar_number(GrammarBuilder& builder, const NumberRange& range);

}  // namespace m3
