// Regular expressions as grammar fragments: the part of ECMA 262 that describes a regular language.
#pragma once
#include <string_view>

#include "text/grammar_chars.h"

namespace m3 {

struct RegexOptions {
  CharForm form = CharForm::kRaw;
  // true: the whole text must match. false (JSON schema's `pattern`): a part of it, unless ^ and $
  // say otherwise.
  bool whole = true;
};

// Supported: literals, ., [...], escapes (\d \w \s \t \n \r \f \v \xHH \uHHHH \u{H} and
// punctuation), groups, |, * + ? {m} {m,} {m,n}, ^ at the start and $ at the end. Throws Error
// naming the construct and its place.
GrammarBuilder::Part grammar_regex(GrammarBuilder& builder, std::string_view pattern,
                                   const RegexOptions& options);

}  // namespace m3
