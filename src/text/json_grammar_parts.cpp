#include "text/json_grammar_parts.h"

#include <algorithm>

#include "text/json_schema_numbers.h"
#include "text/utf8.h"

namespace m3 {

using Part = GrammarBuilder::Part;

template <typename Make>
Part JsonGrammarParts::shared(const char* name, Make make) {
  const auto [at, is_new] = rules_.try_emplace(name, 0);
  if (is_new) {
    at->second = builder_.add_rule();
    builder_.define_rule(at->second, make());  // may call itself: the rule is known by now
  }
  return builder_.call(rules_.at(name));
}

// Up to two spaces, or a line break and its indentation: enough for every usual style, too little
// for a model to lose itself in.
Part JsonGrammarParts::space() {
  constexpr int kMaxSpaces = 2, kMaxIndent = 64;
  return shared("space", [&] {
    const auto one = [&] { return builder_.literal(" "); };
    const auto blank = [&] {
      return builder_.either({builder_.literal(" "), builder_.literal("\t")});
    };
    const Part line =
        builder_.sequence({builder_.literal("\n"), builder_.repeat(blank, 0, kMaxIndent)});
    return builder_.either({builder_.repeat(one, 0, kMaxSpaces), line});
  });
}

Part JsonGrammarParts::string() {
  return shared("string", [&] {
    const auto character = [&] { return grammar_json_char(builder_, UnicodeEscapes::kYes); };
    return quoted(builder_.repeat(character, 0, -1));
  });
}

Part JsonGrammarParts::number() {
  return shared("number", [&] { return grammar_number(builder_, {}); });
}

Part JsonGrammarParts::integer() {
  return shared("integer", [&] { return grammar_number(builder_, {.integers = true}); });
}

Part JsonGrammarParts::any_value() {
  return shared("value", [&] {
    return builder_.either(
        {any_object(), any_array(), string(), number(), boolean(), builder_.literal("null")});
  });
}

Part JsonGrammarParts::any_array() {
  return shared("array", [&] { return list_of([&] { return any_value(); }, 0, -1); });
}

Part JsonGrammarParts::any_object() {
  return shared("object", [&] {
    const auto member = [&] { return builder_.sequence({string(), colon(), any_value()}); };
    const Part more = builder_.optional(builder_.loop(builder_.sequence({comma(), member()})));
    const Part members = builder_.optional(builder_.sequence({member(), more}));
    return builder_.sequence(
        {builder_.literal("{"), space(), members, space(), builder_.literal("}")});
  });
}

Part JsonGrammarParts::text() {
  return shared("text", [&] {
    return builder_.repeat([&] { return grammar_char(builder_, CharSet::all(), CharForm::kRaw); },
                           0, -1);
  });
}

Part JsonGrammarParts::constant(const JsonValue& value) {
  if (!value.is_array() && !value.is_object()) return builder_.literal(value.dump());
  std::vector<Part> parts = {builder_.literal(value.is_array() ? "[" : "{"), space()};
  for (size_t i = 0; i < value.size(); ++i) {
    if (i > 0) parts.push_back(comma());
    if (value.is_object()) {
      parts.push_back(builder_.literal(JsonValue::string(value.keys()[i]).dump()));
      parts.push_back(colon());
    }
    parts.push_back(constant(value.items()[i]));
  }
  if (value.size() > 0) parts.push_back(space());
  parts.push_back(builder_.literal(value.is_array() ? "]" : "}"));
  return builder_.sequence(parts);
}

Part JsonGrammarParts::list_of(const GrammarBuilder::MakePart& item, int64_t min, int64_t max,
                               int64_t num_fixed) {
  if (max >= 0) num_fixed = std::min(num_fixed, max);
  std::vector<Part> fixed;
  for (int64_t i = 0; i < num_fixed; ++i) fixed.push_back(item());
  const auto next = [&] { return builder_.sequence({comma(), item()}); };
  Part items =
      builder_.repeat(next, std::max<int64_t>(min - num_fixed, 0), max < 0 ? -1 : max - num_fixed);
  for (int64_t i = num_fixed - 1; i >= 0; --i) {
    items = builder_.sequence({fixed[static_cast<size_t>(i)], items});
    if (i > 0) items = builder_.sequence({comma(), items});
    if (i >= min) items = builder_.optional(items);
  }
  return builder_.sequence({builder_.literal("["), space(), items, space(), builder_.literal("]")});
}

Part JsonGrammarParts::none_of(const std::vector<std::string_view>& names,
                               const CharSet& forbidden) {
  CharSet taken = forbidden;
  std::map<std::string_view, std::vector<std::string_view>>
      by_first;  // rests by their first character
  std::vector<Part> parts;
  bool may_end = true;
  for (std::string_view name : names) {
    if (name.empty()) {
      may_end = false;
      continue;
    }
    const size_t length = utf8_step(name).length;
    by_first[name.substr(0, length)].push_back(name.substr(length));
  }
  if (may_end) parts.push_back(builder_.empty());
  for (const auto& [first, rests] : by_first) {
    parts.push_back(builder_.sequence({builder_.literal(first), none_of(rests, forbidden)}));
    const uint32_t character = read_utf8(first);
    taken.add({character, character});
  }
  const auto any = [&] { return grammar_char(builder_, forbidden.inverted(), CharForm::kRaw); };
  const Part other = grammar_char(builder_, taken.inverted(), CharForm::kRaw);
  parts.push_back(builder_.sequence({other, builder_.repeat(any, 0, -1)}));
  return builder_.either(parts);
}

}  // namespace m3
