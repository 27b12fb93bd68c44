// Structured output by brute force: masks against stepping byte by byte, random answers against a
// small validator of their own, regular expressions and number ranges against enumeration.
#include "text/grammar.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <thread>

#include "base/check.h"
#include "base/rng.h"
#include "text/grammar_machine.h"
#include "text/output_parser.h"
#include "text/utf8.h"

namespace m3 {
namespace {

JsonValue json(std::string_view text) {
  return JsonValue::parse(text, "test");
}

const Tokenizer& tokenizer() {
  static const Tokenizer tiny =
      Tokenizer::load(std::string(M3_SOURCE_DIR) + "/tests/golden/tokenizer/tiny");
  return tiny;
}

std::shared_ptr<const TokenTrie> trie() {
  static const auto shared = std::make_shared<const TokenTrie>(tokenizer());
  return shared;
}

// Whether a whole text is allowed, byte by byte.
bool allows(const std::shared_ptr<const Grammar>& grammar, std::string_view text) {
  GrammarState state(grammar);
  return state.accept_text(text) && state.can_end();
}
bool schema_allows(std::string_view schema, std::string_view text) {
  return allows(Grammar::json_schema(trie(), json(schema)), text);
}

std::string refusal(std::string_view schema) {
  try {
    Grammar::json_schema(trie(), json(schema));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// --- a validator that shares nothing with the compiler

bool validates(const JsonValue& schema, const JsonValue& value, const JsonValue& root);

const JsonValue& at_pointer(const JsonValue& root, const std::string& pointer) {
  const JsonValue* at = &root;
  size_t from = 1;
  while (from < pointer.size()) {
    const size_t end = std::min(pointer.find('/', from + 1), pointer.size());
    at = at->find(pointer.substr(from + 1, end - from - 1));
    from = end;
  }
  return *at;
}

bool has_type(const JsonValue& value, const std::string& type) {
  if (type == "number") return value.is_number();
  if (type == "integer")
    return value.is_number() && std::floor(value.as_double()) == value.as_double();
  if (type == "boolean") return value.is_bool();
  return type == value.kind_name();
}

size_t num_characters(const std::string& text) {
  size_t count = 0;
  for (char c : text) count += (c & 0xC0) != 0x80;
  return count;
}

bool validates_object(const JsonValue& schema, const JsonValue& value, const JsonValue& root) {
  const JsonValue* properties = schema.find("properties");
  if (const JsonValue* required = schema.find("required")) {
    for (const JsonValue& name : required->items()) {
      if (value.find(name.text()) == nullptr) return false;
    }
  }
  for (size_t i = 0; i < value.size(); ++i) {
    const JsonValue* member = properties == nullptr ? nullptr : properties->find(value.keys()[i]);
    if (member == nullptr) member = schema.find("additionalProperties");
    if (member != nullptr && !validates(*member, value.items()[i], root)) return false;
  }
  return true;
}

bool validates_array(const JsonValue& schema, const JsonValue& value, const JsonValue& root) {
  const auto bound = [&](const char* key, double absent) {
    return schema.find(key) == nullptr ? absent : schema.find(key)->as_double();
  };
  const double size = static_cast<double>(value.size());
  if (size < bound("minItems", 0) || size > bound("maxItems", 1e9)) return false;
  const JsonValue *first = schema.find("prefixItems"), *items = schema.find("items");
  for (size_t i = 0; i < value.size(); ++i) {
    const JsonValue* item = first != nullptr && i < first->size() ? &first->items()[i] : items;
    if (item != nullptr && !validates(*item, value.items()[i], root)) return false;
  }
  return true;
}

bool validates_scalar(const JsonValue& schema, const JsonValue& value) {
  if (value.is_number()) {
    const double number = value.as_double();
    const auto holds = [&](const char* key, auto compare) {
      const JsonValue* bound = schema.find(key);
      return bound == nullptr || compare(number, bound->as_double());
    };
    return holds("minimum", std::greater_equal<>()) && holds("maximum", std::less_equal<>()) &&
           holds("exclusiveMinimum", std::greater<>()) && holds("exclusiveMaximum", std::less<>());
  }
  if (value.is_string()) {
    const auto length = static_cast<double>(num_characters(value.text()));
    if (schema.find("minLength") != nullptr && length < schema.find("minLength")->as_double())
      return false;
    if (schema.find("maxLength") != nullptr && length > schema.find("maxLength")->as_double())
      return false;
    const JsonValue* pattern = schema.find("pattern");
    if (pattern != nullptr && !std::regex_search(value.text(), std::regex(pattern->text())))
      return false;
  }
  return true;
}

bool validates(const JsonValue& schema, const JsonValue& value, const JsonValue& root) {
  if (schema.is_bool()) return schema.as_bool();
  if (schema.find("nullable") != nullptr && value.is_null()) return true;
  if (const JsonValue* reference = schema.find("$ref"))
    return validates(at_pointer(root, reference->text()), value, root);
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const JsonValue* list = schema.find(key);
    if (list == nullptr) continue;
    size_t count = 0;
    for (const JsonValue& branch : list->items()) count += validates(branch, value, root);
    if (key == std::string("anyOf")   ? count == 0
        : key == std::string("oneOf") ? count != 1
                                      : count != list->size())
      return false;
  }
  if (const JsonValue* type = schema.find("type")) {
    bool fits = false;
    const std::vector<JsonValue> types =
        type->is_array() ? type->items() : std::vector<JsonValue>{*type};
    for (const JsonValue& name : types) fits = fits || has_type(value, name.text());
    if (!fits) return false;
  }
  if (const JsonValue* list = schema.find("enum")) {
    if (std::find(list->items().begin(), list->items().end(), value) == list->items().end())
      return false;
  }
  if (schema.find("const") != nullptr && !(*schema.find("const") == value)) return false;
  if (value.is_object()) return validates_object(schema, value, root);
  if (value.is_array()) return validates_array(schema, value, root);
  return validates_scalar(schema, value);
}

// --- random answers

const char* const kSchemas[] = {
    R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},"required":["name","age"]})",
    R"({"type":"object","properties":{"a":{"type":"number"},"ab":{"type":"boolean"},"abc":{"type":"null"}}})",
    R"({"type":"object","properties":{"a":{"type":"string"}},"required":["a"],"additionalProperties":{"type":"integer"}})",
    R"({"type":"object","additionalProperties":{"type":"array","items":{"type":"boolean"}}})",
    R"({"type":"array","items":{"type":"object","properties":{"id":{"type":"integer","minimum":1,"maximum":250}},"required":["id"]},"minItems":1,"maxItems":3})",
    R"({"type":"array","prefixItems":[{"type":"string","maxLength":3},{"type":"integer"}],"items":false,"minItems":1})",
    R"({"enum":["red","green","light green",7,null,{"x":[1,2.5]}]})",
    R"({"anyOf":[{"type":"object","properties":{"kind":{"const":"a"},"x":{"type":"integer"}},"required":["kind","x"]},
                 {"type":"object","properties":{"kind":{"const":"b"},"y":{"type":"string","maxLength":4}},"required":["kind","y"]}]})",
    R"({"oneOf":[{"type":"string","minLength":2,"maxLength":5},{"type":"integer","exclusiveMinimum":-3,"exclusiveMaximum":12},{"type":"null"}]})",
    R"({"type":"string","pattern":"^[a-c]{2,4}-\\d+$"})",
    R"({"type":"string","pattern":"^(x?[\"\\\\\n]y|z)$"})",
    R"({"type":["number","null"],"minimum":-1.25,"exclusiveMaximum":2.5})",
    R"({"$defs":{"node":{"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},
        "required":["v","next"]}},"$ref":"#/$defs/node"})",
    R"({"type":"object","properties":{"free":{},"list":{"type":"array"},"any":{"type":"object"}},"required":["list"]})",
};

// Follows the masks with random choices; prefers tokens that close something once the text is long.
std::string random_answer(const std::shared_ptr<const Grammar>& grammar, Philox& random,
                          bool check_masks) {
  GrammarState state(grammar);
  std::string text;
  for (int step = 0; step < 400; ++step) {
    if (state.can_end() && (state.must_end() || random.below(3) == 0)) return text;
    const TokenMask mask = state.mask();
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < trie()->num_tokens(); ++id) {
      if (mask.test(id)) allowed.push_back(id);
      if (!check_masks || step % 7 != 0) continue;
      GrammarState copy = state;
      EXPECT_EQ(copy.accept(id), mask.test(id))
          << "token " << id << " '" << tokenizer().bytes(id) << "' behind " << text;
    }
    EXPECT_FALSE(allowed.empty()) << "nothing may follow " << text;
    if (allowed.empty()) return text;
    int32_t choice = allowed[random.below(allowed.size())];
    if (step > 30) {  // close what is open, the innermost first
      const auto prefer = [&](std::string_view bytes) {
        for (int32_t id : allowed) {
          if (tokenizer().bytes(id) == bytes) choice = id;
        }
      };
      for (const char* bytes : {"n", "\"", "]", "}"}) prefer(bytes);
      const auto may_follow = [&](std::string_view bytes) {
        return std::any_of(allowed.begin(), allowed.end(),
                           [&](int32_t id) { return tokenizer().bytes(id) == bytes; });
      };
      if (may_follow("z")) prefer("\"");  // inside a string a brace closes nothing
    }
    EXPECT_TRUE(state.accept(choice));
    text += tokenizer().bytes(choice);
  }
  return text + " (without an end)";
}

TEST(Grammar, random_answers_parse_and_validate) {
  const uint64_t seed = 77;
  Philox random(seed);
  for (const char* schema_text : kSchemas) {
    const JsonValue schema = json(schema_text);
    const auto grammar = Grammar::json_schema(trie(), schema);
    for (int round = 0; round < 60; ++round) {
      const std::string text = random_answer(grammar, random, round < 2);
      const auto value = JsonValue::try_parse(text);
      ASSERT_TRUE(value.has_value())
          << "seed " << seed << ", schema " << schema_text << ": " << text;
      ASSERT_TRUE(validates(schema, *value, schema))
          << "seed " << seed << ", schema " << schema_text << ": " << text;
    }
  }
}

TEST(Grammar, json_mode_gives_objects) {
  Philox random(78);
  const auto grammar = Grammar::json_object(trie());
  for (int round = 0; round < 60; ++round) {
    const std::string text = random_answer(grammar, random, round < 2);
    const auto value = JsonValue::try_parse(text);
    ASSERT_TRUE(value && value->is_object()) << text;
  }
  for (const char* text : {"{}",
                           "\n{ \"a\" : [1, -2.5e3, true, null, \"\\u00e9\\ud83d\\ude00\"], \"b\": "
                           "{\n    \"c\":{}} }"}) {
    EXPECT_TRUE(allows(grammar, text)) << text;
  }
  for (const char* text : {"", "[]", "{", "{\"a\"}", "{\"a\":1,}", "{\"a\":01}", "{\"a\":\"\n\"}",
                           "{\"a\":\"\\x\"}", "{} {}", "{\"a\":\"\\ud800\"}", "{\"a\":\"\xff\"}",
                           "{a:1}", "{\"a\":+1}", "{\"a\":.5}", "{\"a\":NaN}"}) {
    EXPECT_FALSE(allows(grammar, text)) << text;
  }
}

TEST(Grammar, schemas_allow_and_refuse_the_right_texts) {
  struct Case {
    const char* schema;
    std::vector<const char*> good, bad;
  };
  const Case cases[] = {
      {kSchemas[0],
       {R"({"name":"x","age":3})", R"( { "name" : "\"" , "age" : -0 })"},
       {R"({"name":"x"})", R"({"age":3,"name":"x"})", R"({"name":"x","age":3.5})",
        R"({"name":"x","age":3,"z":1})", R"({"name":1,"age":3})"}},
      {kSchemas[1],
       {"{}", R"({"abc":null})", R"({"a":1.5,"abc":null})", R"({"ab":true})"},
       {R"({"ab":1})", R"({"abc":null,"a":1})", R"({,"a":1})"}},
      {kSchemas[2],
       {R"({"a":"x"})", R"({"a":"x","b":1,"aa":2,"":3})"},
       {R"({"b":1})", R"({"a":"x","a":1})", R"({"a":"x","b":"y"})", R"({"a":"x","\u0061":1})"}},
      {kSchemas[4],
       {R"([{"id":1}])", R"([{"id":250},{"id":99}])"},
       {"[]", R"([{"id":0}])", R"([{"id":251}])", R"([{"id":1},{"id":1},{"id":1},{"id":1}])"}},
      {kSchemas[5], {R"(["abc"])", R"(["",5])"}, {"[]", R"(["abcd"])", R"(["a",5,6])"}},
      {kSchemas[6],
       {"\"red\"", "7", "null", R"({"x":[1, 2.5]})"},
       {"\"blue\"", "8", "7.0", R"({"x":[1]})"}},
      {kSchemas[7],
       {R"({"kind":"a","x":1})", R"({"kind":"b","y":"q"})"},
       {R"({"kind":"a","y":"q"})"}},
      {kSchemas[8],
       {"\"ab\"", "\"\xC3\xA9\xC3\xA9\"", "-2", "11", "null"},
       {"\"a\"", "\"abcdef\"", "-3", "12", "1.5"}},
      {kSchemas[12],
       {R"({"v":1,"next":{"v":2,"next":null}})"},
       {R"({"v":1})", R"({"v":1,"next":{}})"}},
      {R"({"type":"string","format":"date"})", {"\"2026-02-28\""}, {"\"2026-13-01\"", "\"x\""}},
      {R"({"type":"string","format":"uuid"})",
       {"\"123e4567-e89b-12d3-a456-426614174000\""},
       {"\"123\""}},
      {R"({"type":"string","format":"email"})", {"\"whatever\""}, {}},
      {R"({"type":"string","nullable":true})", {"null", "\"\""}, {"1"}},
      {R"({"properties":{"a":{"type":"boolean"}}})", {R"({"a":true})"}, {"1"}},
      {R"({"type":"integer","multipleOf":1})", {"12"}, {}},
      {"true", {"1", "[]", "\"x\""}, {""}},
      {R"({"type":"object","properties":{},"additionalProperties":false})",
       {"{}", "{ }"},
       {R"({"a":1})"}},
      {R"({"type":"array","items":false})", {"[]"}, {"[1]"}},
      {R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
  };
  for (const Case& entry : cases) {
    for (const char* text : entry.good) {
      EXPECT_TRUE(schema_allows(entry.schema, text)) << entry.schema << " must allow " << text;
      const auto schema = json(entry.schema);
      EXPECT_TRUE(validates(schema, json(text), schema))
          << "the test's own validator: " << entry.schema << " " << text;
    }
    for (const char* text : entry.bad)
      EXPECT_FALSE(schema_allows(entry.schema, text)) << entry.schema << " must refuse " << text;
  }
}

TEST(Grammar, what_cannot_be_held_is_refused_with_its_pointer) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"object","properties":{"a/b":{"not":{}}}})", "#/properties/a~1b/not"},
      {R"({"type":"array","uniqueItems":true})", "#/uniqueItems"},
      {R"({"type":"object","patternProperties":{}})", "#/patternProperties"},
      {R"({"type":"object","minProperties":1})", "#/minProperties"},
      {R"({"type":"number","multipleOf":0.5})", "#/multipleOf"},
      {R"({"if":{},"then":{}})", "#/if"},
      {R"({"allOf":[{},{}]})", "#/allOf"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "#/oneOf"},
      {R"({"anyOf":[]})", "#/anyOf"},
      {R"({"anyOf":[{}],"type":"string"})", "#/type"},
      {R"({"$ref":"http://example.com/schema"})", "#/$ref"},
      {R"({"$ref":"#/nowhere"})", "#/$ref"},
      {R"({"type":"text"})", "#/type"},
      {R"({"type":[]})", "#/type"},
      {R"({"type":"array","items":7})", "#/items"},
      {R"_({"type":"array","items":{"type":"string","pattern":"(?=x)"}})_", "#/items/pattern"},
      {R"({"type":"string","maxLength":100000})", "#/maxLength"},
      {R"({"type":"string","minLength":3,"maxLength":2})", "#"},
      {R"({"type":"object","properties":{"a":{}},"required":["b"]})", "#/required"},
      {R"({"type":"object","properties":{"a":false}})", "#/properties/a"},
      {R"({"type":"object","required":["a"]})", "#/required"},
      {R"({"oneOf":[{"type":"string","nullable":true},{"type":"integer","nullable":true}]})",
       "#/oneOf"},
      {R"({"oneOf":[{"type":["object","null"],"properties":{"k":{"const":1}},"required":["k"]},
                    {"type":["object","null"],"properties":{"k":{"const":2}},"required":["k"]}]})",
       "#/oneOf"},
      {R"({"oneOf":[{"type":"object","properties":{"k":{"const":1}},"required":["k"]},
                    {"type":"object","properties":{"k":{"const":1.0}},"required":["k"]}]})",
       "#/oneOf"},
      {R"({"enum":["a"],"type":"integer"})", "#"},
      {R"({"const":1,"minimum":0})", "#/minimum"},
      {R"({"someKeyword":1})", "#/someKeyword"},
      {"3", "#"},
  };
  for (const auto& [schema, pointer] : cases) {
    const std::string message = refusal(schema);
    EXPECT_TRUE(message.starts_with(std::string(pointer) + ":"))
        << schema << " gave '" << message << "'";
  }
}

TEST(Grammar, schemas_without_an_end_are_refused) {
  EXPECT_NE(refusal(R"({"$ref":"#"})").find("no text satisfies"), std::string::npos);
  EXPECT_NE(refusal(R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})")
                .find("no text satisfies"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})").find("without consuming"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"type":"integer","minimum":5,"maximum":4})").find("no text satisfies"),
            std::string::npos);
  std::string wide =
      R"({"type":"array","items":{"type":"string","minLength":1000},"minItems":1000})";
  EXPECT_LT(Grammar::json_schema(trie(), json(wide))->num_states(),
            20'000u);  // the item is compiled once
  std::string large = R"({"type":"object","properties":{)";
  for (int i = 0; i < 100; ++i)
    large += fmt::format(R"({}"p{}":{{"type":"string","minLength":1000}})", i == 0 ? "" : ",", i);
  EXPECT_NE(refusal(large + "}}").find("too large"), std::string::npos);
  std::string deep = "true";
  for (int i = 0; i < 200; ++i) deep = R"({"type":"array","items":)" + deep + "}";
  EXPECT_NE(refusal(deep).find("deep"), std::string::npos);
}

TEST(Grammar, integer_ranges_hold_exactly_their_numbers) {
  const uint64_t seed = 5;
  Philox random(seed);
  for (int round = 0; round < 60; ++round) {
    const int64_t low = static_cast<int64_t>(random.below(2400)) - 1200,
                  high = low + static_cast<int64_t>(random.below(1500));
    const auto grammar = Grammar::json_schema(
        trie(), json(fmt::format(R"({{"type":"integer","minimum":{},"maximum":{}}})", low, high)));
    for (int64_t n = -1300; n <= 2800; n += 1 + static_cast<int64_t>(random.below(9))) {
      EXPECT_EQ(allows(grammar, std::to_string(n)), low <= n && n <= high)
          << n << " in " << low << ".." << high << ", seed " << seed;
    }
    for (int64_t n : {low - 1, low, high, high + 1})
      EXPECT_EQ(allows(grammar, std::to_string(n)), low <= n && n <= high) << n;
  }
}

TEST(Grammar, decimal_ranges_hold_exactly_their_numbers) {
  const uint64_t seed = 6;
  Philox random(seed);
  const auto decimal = [&](int64_t thousandths) {  // as text with 0 to 4 decimals
    std::string text = fmt::format("{}{}.{:03}", thousandths < 0 ? "-" : "",
                                   std::abs(thousandths) / 1000, std::abs(thousandths) % 1000);
    while (text.ends_with('0')) text.pop_back();
    if (text.ends_with('.')) text.pop_back();
    return text;
  };
  for (int round = 0; round < 80; ++round) {
    const int64_t low = static_cast<int64_t>(random.below(8000)) - 4000,
                  high = low + 1 + static_cast<int64_t>(random.below(4000));
    const bool open_low = random.below(2) == 0, open_high = random.below(2) == 0;
    const std::string schema = fmt::format(
        R"({{"type":"number","{}":{},"{}":{}}})", open_low ? "exclusiveMinimum" : "minimum",
        decimal(low), open_high ? "exclusiveMaximum" : "maximum", decimal(high));
    const auto grammar = Grammar::json_schema(trie(), json(schema));
    const auto inside = [&](int64_t n) {
      return (open_low ? n > low : n >= low) && (open_high ? n < high : n <= high);
    };
    for (int i = 0; i < 200; ++i) {
      int64_t n = i < 8 ? (i % 2 == 0 ? low : high) + (i / 2 - 1)
                        : static_cast<int64_t>(random.below(20000)) - 10000;
      const std::string text = decimal(n);
      if (text == "-0" || text == "0") continue;  // zero is checked below
      EXPECT_EQ(allows(grammar, text), inside(n)) << text << " in " << schema << ", seed " << seed;
      if (text.find('.') == text.npos) continue;
      EXPECT_EQ(allows(grammar, text + "00"), inside(n)) << text << "00 in " << schema;
    }
    EXPECT_EQ(allows(grammar, "0"), inside(0)) << schema;
  }
}

TEST(Grammar, regular_expressions_agree_with_the_standard_library) {
  const char* const patterns[] = {
      "a*b",        "(ab|a)(bc|c)", "a{2,3}b?",        "[^a]b+",         "(a|b)*abb", "a.c",
      "",           "a|",           "(?:ab){2}c{0,1}", "[a-b]c|c[^b-c]", "\\w+b",     "(a*)*c",
      "(a|b|c){3}", "a+?b*?",       "\\x61[\\u0062]"};
  for (const char* pattern : patterns) {
    const auto grammar = Grammar::regex(trie(), pattern);
    const std::regex standard(pattern);
    std::vector<std::string> texts = {""};
    for (size_t i = 0; i < texts.size() && texts[i].size() < 6; ++i) {
      for (char c : {'a', 'b', 'c'}) texts.push_back(texts[i] + c);
    }
    for (const std::string& text : texts) {
      EXPECT_EQ(allows(grammar, text), std::regex_match(text, standard))
          << pattern << " on '" << text << "'";
    }
  }
  for (const char* pattern : {"a(", "a)", "[a", "a{3,2}", "a{2000}", "(?=a)", "(?<n>a)", "a**",
                              "\\b", "\\1", "*a", "[b-a]", "a^b", "\\ud800"}) {
    EXPECT_THROW(Grammar::regex(trie(), pattern), Error) << pattern;
  }
}

TEST(Grammar, character_classes_cover_exactly_their_characters) {
  const auto grammar = Grammar::regex(trie(), "[^\\u0080-\\u{ffff}x]");
  for (uint32_t character = 1; character <= 0x10FFFF; character += character < 0x3000 ? 1 : 97) {
    if (character >= 0xD800 && character <= 0xDFFF) continue;
    std::string text;
    append_utf8(character, text);
    EXPECT_EQ(allows(grammar, text), character != 'x' && (character < 0x80 || character > 0xFFFF))
        << character;
  }
}

TEST(Grammar, choices_are_whole_texts) {
  const std::vector<std::string> texts = {"yes", "yes please", "no"};
  const auto grammar = Grammar::choice(trie(), texts);
  for (const std::string& text : texts) EXPECT_TRUE(allows(grammar, text));
  EXPECT_FALSE(allows(grammar, "ye"));
  EXPECT_FALSE(allows(grammar, "yes pleas"));
  GrammarState state(grammar);
  state.accept_text("yes");
  EXPECT_TRUE(state.can_end());
  EXPECT_FALSE(state.must_end());
  state.accept_text(" please");
  EXPECT_TRUE(state.must_end());
}

TEST(Grammar, added_tokens_are_never_text) {
  GrammarState state(Grammar::json_object(trie()));
  ASSERT_TRUE(state.accept_text("{\"a\":\""));
  for (int32_t id = 0; id < tokenizer().size(); ++id) {
    if (!tokenizer().is_added(id)) continue;
    EXPECT_FALSE(state.mask().test(id));
    EXPECT_FALSE(state.accept(id));
  }
}

TEST(Grammar, tokens_that_count_by_id_are_taken_by_id) {
  GrammarBuilder builder;
  const int rule = builder.add_rule();
  builder.define_rule(
      rule, builder.sequence({builder.literal("a"), builder.token(1082), builder.literal("b")}));
  const auto grammar = std::make_shared<const Grammar>(trie(), builder.finish(rule, 100));
  GrammarState state(grammar);
  EXPECT_FALSE(state.accept(1082));
  EXPECT_TRUE(state.accept_text("a"));
  EXPECT_EQ(state.mask().count(), 1);
  EXPECT_TRUE(state.mask().test(1082));
  EXPECT_TRUE(state.accept(1082));
  EXPECT_TRUE(state.accept_text("b"));
  EXPECT_TRUE(state.can_end());
}

// --- forced tool calls

constexpr const char* kTools = R"([
    {"type":"function","function":{"name":"edit","strict":true,"parameters":{"type":"object","properties":{
      "path":{"type":"string"},"line":{"type":"integer","minimum":1},"mode":{"enum":["a","b",3]},
      "opts":{"type":"object","properties":{"force":{"type":"boolean"},"note":{"type":["string","null"]}},"required":["force"]},
      "sizes":{"type":"array","items":{"type":"number"},"maxItems":3},"pair":{"type":"array","prefixItems":[{"type":"boolean"},{"type":"integer"}],"items":false},
      "extra":{"type":"object","additionalProperties":{"type":"integer"}}},"required":["path","line"],"additionalProperties":false}}},
    {"type":"function","function":{"name":"search","parameters":{"type":"object","properties":{"q":{"type":"string"}}}}}])";

TEST(Grammar, forced_tool_calls_are_read_back_and_hold_their_schema) {
  const auto tools = read_tools(json(kTools));
  const int32_t marker = tokenizer().require_added_id(chat_token::kNamespace);
  const auto grammar =
      Grammar::tool_calls(trie(), tools, {.parallel = true, .namespace_id = marker});
  const uint64_t seed = 80;
  Philox random(seed);
  int num_strict = 0;
  for (int round = 0; round < 80; ++round) {
    GrammarState state(grammar);
    std::vector<int32_t> ids;
    const auto take = [&](int32_t id) {
      ASSERT_TRUE(state.accept(id));
      ids.push_back(id);
    };
    const auto finish_with = [&](std::string_view text) {  // takes the text if it may follow
      GrammarState copy = state;
      if (!copy.accept_text(text)) return false;
      for (unsigned char byte : text) {  // one byte is one token of the tiny vocabulary
        for (int32_t id = 0; id < 256; ++id) {
          if (tokenizer().bytes(id) == std::string_view(reinterpret_cast<const char*>(&byte), 1))
            take(id);
        }
      }
      return true;
    };
    for (int step = 0; step < 400 && !state.must_end(); ++step) {
      const TokenMask mask = state.mask();
      const bool in_tag = !ids.empty() && ids.back() == marker;
      if (step > 40 && in_tag && (finish_with("</invoke>\n") || finish_with("</tool_call>")))
        continue;
      if (step > 40 && !in_tag && !mask.test(marker) && finish_with(">")) continue;  // a tag's name
      if (mask.test(marker) && (step > 25 || random.below(4) == 0)) {
        take(marker);
        continue;
      }
      std::vector<int32_t> allowed;
      for (int32_t id = 0; id < trie()->num_tokens(); ++id) {
        if (mask.test(id)) allowed.push_back(id);
      }
      ASSERT_FALSE(allowed.empty());
      take(allowed[random.below(allowed.size())]);
    }
    const std::string text = tokenizer().decode(ids);
    ASSERT_TRUE(state.can_end()) << "seed " << seed << ": " << text;
    TokenOutputParser parser(tokenizer(), tools, "</mm:think>");
    std::vector<OutputEvent> events;
    for (int32_t id : ids) parser.push(id, events);
    parser.push(tokenizer().require_added_id(chat_token::kTurnEnd), events);
    parser.finish(events);
    EXPECT_TRUE(parser.result().complete && parser.result().parse_error.empty()) << text;
    EXPECT_EQ(parser.result().content, std::nullopt) << text;
    ASSERT_FALSE(parser.result().tool_calls.empty()) << text;
    for (const ToolCall& call : parser.result().tool_calls) {
      const Tool& tool = tools[call.name == "edit" ? 0 : 1];
      EXPECT_EQ(call.name, tool.name());
      if (call.name != "edit") continue;
      ++num_strict;
      EXPECT_TRUE(validates(*tool.parameters(), call.arguments, *tool.parameters()))
          << "seed " << seed << ": " << call.arguments.dump() << " from " << text;
    }
  }
  EXPECT_GT(num_strict, 20);
}

TEST(Grammar, one_call_only_where_calls_may_not_be_parallel) {
  const auto tools = read_tools(json(kTools));
  const int32_t marker = tokenizer().require_added_id(chat_token::kNamespace);
  for (const bool parallel : {false, true}) {
    GrammarState state(Grammar::tool_calls(trie(), std::span(tools).subspan(1),
                                           {.parallel = parallel, .namespace_id = marker}));
    EXPECT_FALSE(state.accept_text("Sure"));
    for (const char* text :
         {"<tool_call>\n", "<invoke name=\"search\">", "<q>", "</q>", "</invoke>\n"}) {
      ASSERT_TRUE(state.accept(marker)) << text;
      ASSERT_TRUE(state.accept_text(text)) << text;
    }
    ASSERT_TRUE(state.accept(marker));
    EXPECT_EQ(GrammarState(state).accept_text("<invoke name=\"search\">"), parallel);
    EXPECT_TRUE(state.accept_text("</tool_call>"));
    EXPECT_TRUE(state.can_end() && state.must_end());
  }
}

TEST(Grammar, threads_share_a_grammar) {
  const auto grammar = Grammar::json_schema(trie(), json(kSchemas[7]));
  std::vector<std::thread> threads;
  std::vector<std::string> answers(4);
  for (size_t i = 0; i < answers.size(); ++i) {
    threads.emplace_back([&, i] {
      Philox random(9);
      answers[i] = random_answer(grammar, random, false);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const std::string& answer : answers) EXPECT_EQ(answer, answers[0]);
}

}  // namespace
}  // namespace m3
