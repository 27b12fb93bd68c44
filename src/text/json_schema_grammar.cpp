#include "text/json_schema_grammar.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/check.h"
#include "text/grammar_chars.h"
#include "text/grammar_regex.h"
#include "text/json_schema_numbers.h"
#include "text/utf8.h"

namespace m3 {

using Part = GrammarBuilder::Part;

namespace {

// Keywords without influence on what is valid.
constexpr std::string_view kAnnotations[] = {
    "title",   "description", "default",    "examples",   "example",       "deprecated",      "readOnly",
    "writeOnly", "$schema",   "$id",        "$comment",   "$anchor",       "$defs",           "definitions",
    "discriminator", "contentEncoding", "contentMediaType", "externalDocs", "xml", "nullable"};

// Strings of these formats are held to their form; other formats are annotations, as the standard has it.
constexpr std::pair<std::string_view, std::string_view> kFormats[] = {
    {"date", R"([0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01]))"},
    {"time", R"((?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"},
    {"date-time",
     R"([0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"},
    {"uuid", R"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"},
    {"ipv4", R"((?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9]))"}};

constexpr int64_t kMaxCount = 1000;  // of minLength, maxItems and the like
constexpr int kMaxIndent = 64;       // white space behind a line break

std::string escape_pointer(std::string_view key) {
  std::string out;
  for (char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

std::string unescape_pointer(const std::string& part) {
  std::string out;
  for (size_t i = 0; i < part.size(); ++i) {
    const bool is_escape = part[i] == '~' && i + 1 < part.size() && (part[i + 1] == '0' || part[i + 1] == '1');
    out += is_escape ? (part[i + 1] == '0' ? '~' : '/') : part[i];
    i += is_escape ? 1 : 0;
  }
  return out;
}

class SchemaCompiler {
 public:
  SchemaCompiler(const JsonValue& root, const JsonGrammarLimits& limits) : root_(root), limits_(limits) {}

  GrammarMachine compile() {
    const int rule = builder_.add_rule();
    builder_.define_rule(rule, builder_.sequence({space(), value(root_, "#", 0)}));
    return builder_.finish(rule, limits_.max_states);
  }

  GrammarMachine compile_any_object() {
    const int rule = builder_.add_rule();
    builder_.define_rule(rule, builder_.sequence({space(), any_object()}));
    return builder_.finish(rule, limits_.max_states);
  }

 private:
  [[noreturn]] static void refuse(const std::string& at, std::string_view why) {
    M3_FAIL("{}: {}; structured output cannot hold it (docs/structured-output.md)", at, why);
  }

  // --- shared rules: one state serves every place that calls it, and so does its mask

  template <typename Make>
  Part shared(const char* name, Make make) {
    const auto [at, is_new] = shared_.try_emplace(name, 0);
    if (is_new) {
      at->second = builder_.add_rule();
      const int rule = at->second;
      builder_.define_rule(rule, make());
      return builder_.call(rule);
    }
    return builder_.call(at->second);
  }

  // Up to two spaces, or a line break and its indentation: enough for every usual style, too little for a
  // model to lose itself in.
  Part space() {
    return shared("space", [&] {
      const auto blank = [&] { return builder_.either({builder_.literal(" "), builder_.literal("\t")}); };
      const Part line = builder_.sequence({builder_.literal("\n"), builder_.repeat(blank, 0, kMaxIndent)});
      return builder_.either({builder_.repeat([&] { return builder_.literal(" "); }, 0, 2), line});
    });
  }
  Part string() {
    return shared("string", [&] {
      const Part body = builder_.repeat([&] { return grammar_json_char(builder_, UnicodeEscapes::kYes); }, 0, -1);
      return builder_.sequence({builder_.literal("\""), body, builder_.literal("\"")});
    });
  }
  Part number() {
    return shared("number", [&] { return grammar_number(builder_, {}); });
  }
  Part any_value() {
    return shared("value", [&] {
      return builder_.either({any_object(), any_array(), string(), number(), builder_.literal("true"),
                              builder_.literal("false"), builder_.literal("null")});
    });
  }
  Part any_array() {
    return shared("array", [&] { return list_of([&] { return any_value(); }, 0, -1); });
  }
  Part any_object() {
    return shared("object", [&] {
      const auto member = [&] { return builder_.sequence({string(), colon(), any_value()}); };
      const Part more = builder_.optional(builder_.loop(builder_.sequence({comma(), member()})));
      const Part members = builder_.optional(builder_.sequence({member(), more}));
      return builder_.sequence({builder_.literal("{"), space(), members, space(), builder_.literal("}")});
    });
  }

  // --- punctuation

  Part colon() { return builder_.sequence({space(), builder_.literal(":"), space()}); }
  Part comma() { return builder_.sequence({space(), builder_.literal(","), space()}); }

  // [item, item, ...] with min to max items (max < 0: no end). item() is called once for each of the first
  // num_fixed items, in order, then for those that may repeat.
  Part list_of(const GrammarBuilder::MakePart& item, int64_t min, int64_t max, int64_t num_fixed = 1) {
    if (max >= 0) num_fixed = std::min(num_fixed, max);
    std::vector<Part> fixed;
    for (int64_t i = 0; i < num_fixed; ++i) fixed.push_back(item());
    const auto next = [&] { return builder_.sequence({comma(), item()}); };
    Part items = builder_.repeat(next, std::max<int64_t>(min - num_fixed, 0), max < 0 ? -1 : max - num_fixed);
    for (int64_t i = num_fixed - 1; i >= 0; --i) {
      items = builder_.sequence({fixed[static_cast<size_t>(i)], items});
      if (i > 0) items = builder_.sequence({comma(), items});
      if (i >= min) items = builder_.optional(items);
    }
    return builder_.sequence({builder_.literal("["), space(), items, space(), builder_.literal("]")});
  }

  // --- schemas

  Part value(const JsonValue& schema, const std::string& at, int depth) {
    if (depth > limits_.max_depth) refuse(at, fmt::format("the schema is nested more than {} deep", limits_.max_depth));
    if (schema.is_bool()) {
      if (!schema.as_bool()) refuse(at, "nothing satisfies the schema false");
      return any_value();
    }
    if (!schema.is_object()) refuse(at, fmt::format("a schema is of type {}, want an object", schema.kind_name()));
    std::vector<Part> parts = {constrained_value(schema, at, depth)};
    const JsonValue* nullable = schema.find("nullable");
    if (nullable != nullptr && nullable->is_bool() && nullable->as_bool()) parts.push_back(builder_.literal("null"));
    return parts.size() == 1 ? parts[0] : builder_.either(parts);
  }

  Part constrained_value(const JsonValue& schema, const std::string& at, int depth) {
    if (const JsonValue* reference = schema.find("$ref")) {
      allow_only(schema, at, {"$ref"});
      return referenced(*reference, at, depth);
    }
    if (schema.find("enum") != nullptr || schema.find("const") != nullptr) {
      allow_only(schema, at, {"enum", "const", "type"});
      return listed(schema, at);
    }
    for (const char* key : {"anyOf", "oneOf", "allOf"}) {
      if (const JsonValue* list = schema.find(key)) {
        allow_only(schema, at, {key});
        return combined(key, *list, at, depth);
      }
    }
    const std::vector<std::string> types = types_of(schema, at);
    check_keywords(schema, at, types);
    if (types.empty()) return any_value();
    std::vector<Part> parts;
    for (const std::string& type : types) parts.push_back(typed(type, schema, at, depth));
    return parts.size() == 1 ? parts[0] : builder_.either(parts);
  }

  static bool is_annotation(std::string_view key) {
    return key.starts_with("x-") || std::find(std::begin(kAnnotations), std::end(kAnnotations), key) != std::end(kAnnotations);
  }

  static void allow_only(const JsonValue& schema, const std::string& at, std::initializer_list<std::string_view> allowed) {
    for (const std::string& key : schema.keys()) {
      if (is_annotation(key) || std::find(allowed.begin(), allowed.end(), key) != allowed.end()) continue;
      refuse(at + "/" + escape_pointer(key), fmt::format("'{}' beside '{}' is not supported", key, *allowed.begin()));
    }
  }

  static const std::map<std::string_view, std::vector<std::string_view>>& keywords_by_type() {
    static const std::map<std::string_view, std::vector<std::string_view>> map = {
        {"object", {"properties", "required", "additionalProperties"}},
        {"array", {"items", "prefixItems", "minItems", "maxItems"}},
        {"string", {"minLength", "maxLength", "pattern", "format"}},
        {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
        {"integer", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
        {"boolean", {}},
        {"null", {}}};
    return map;
  }

  // Every keyword must be one that is held, or have no say on the types that the schema allows.
  void check_keywords(const JsonValue& schema, const std::string& at, const std::vector<std::string>& types) const {
    for (size_t i = 0; i < schema.size(); ++i) {
      const std::string& key = schema.keys()[i];
      if (key == "type" || is_annotation(key)) continue;
      bool is_held = false;
      for (const auto& [type, keywords] : keywords_by_type()) {
        is_held = is_held || std::find(keywords.begin(), keywords.end(), key) != keywords.end();
      }
      const JsonValue& value = schema.items()[i];
      const bool has_no_effect = (key == "uniqueItems" && value.is_bool() && !value.as_bool()) ||
                                 (key == "multipleOf" && types == std::vector<std::string>{"integer"} && value.text() == "1");
      if (!is_held && !has_no_effect) refuse(at + "/" + escape_pointer(key), fmt::format("the keyword '{}' is not supported", key));
    }
  }

  // `type`, or what the keywords speak of.
  std::vector<std::string> types_of(const JsonValue& schema, const std::string& at) const {
    std::vector<std::string> types;
    const auto add = [&](const JsonValue& name) {
      if (!name.is_string() || !keywords_by_type().contains(name.text())) refuse(at + "/type", fmt::format("unknown type {}", name.dump()));
      if (std::find(types.begin(), types.end(), name.text()) == types.end()) types.push_back(name.text());
    };
    if (const JsonValue* type = schema.find("type")) {
      if (type->is_array()) {
        for (const JsonValue& name : type->items()) add(name);
        if (types.empty()) refuse(at + "/type", "an empty list of types");
      } else {
        add(*type);
      }
    } else {
      for (const char* type : {"object", "array", "string", "number"}) {
        for (std::string_view keyword : keywords_by_type().at(type)) {
          if (schema.find(keyword) != nullptr && (types.empty() || types.back() != type)) types.push_back(type);
        }
      }
    }
    // Every integer is a number.
    if (std::find(types.begin(), types.end(), "number") != types.end()) std::erase(types, "integer");
    return types;
  }

  Part typed(const std::string& type, const JsonValue& schema, const std::string& at, int depth) {
    if (type == "object") return object(schema, at, depth);
    if (type == "array") return array(schema, at, depth);
    if (type == "string") return string_schema(schema, at);
    if (type == "boolean") return builder_.either({builder_.literal("true"), builder_.literal("false")});
    if (type == "null") return builder_.literal("null");
    return number_schema(schema, at, type == "integer");
  }

  // --- references and combinations

  Part referenced(const JsonValue& reference, const std::string& at, int depth) {
    if (!reference.is_string() || !reference.text().starts_with('#')) {
      refuse(at + "/$ref", "only references into the same schema (#/...) are supported");
    }
    const auto [rule, is_new] = references_.try_emplace(reference.text(), 0);
    if (is_new) {
      const int id = builder_.add_rule();
      rule->second = id;
      builder_.define_rule(id, value(resolve(reference.text(), at), reference.text(), depth + 1));
      return builder_.call(id);
    }
    return builder_.call(rule->second);
  }

  const JsonValue& resolve(const std::string& reference, const std::string& at) const {
    const JsonValue* target = &root_;
    size_t from = 1;
    while (from < reference.size()) {
      if (reference[from] != '/') refuse(at + "/$ref", fmt::format("anchors are not supported: '{}'", reference));
      const size_t end = std::min(reference.find('/', from + 1), reference.size());
      const std::string key = unescape_pointer(reference.substr(from + 1, end - from - 1));
      const JsonValue* next = target->find(key);
      if (target->is_array() && !key.empty() && key.find_first_not_of("0123456789") == key.npos && key.size() < 9 &&
          std::stoul(key) < target->size()) {
        next = &target->items()[std::stoul(key)];
      }
      if (next == nullptr) refuse(at + "/$ref", fmt::format("'{}' leads nowhere", reference));
      target = next;
      from = end;
    }
    return *target;
  }

  Part combined(const std::string& key, const JsonValue& list, const std::string& at, int depth) {
    const std::string place = at + "/" + key;
    if (!list.is_array() || list.size() == 0) refuse(place, "want a list of schemas");
    if (key == "allOf" && list.size() > 1) refuse(place, "more than one schema in allOf");
    if (key == "oneOf") check_disjoint(list, place);
    std::vector<Part> parts;
    for (size_t i = 0; i < list.size(); ++i) parts.push_back(value(list.items()[i], fmt::format("{}/{}", place, i), depth + 1));
    return parts.size() == 1 ? parts[0] : builder_.either(parts);
  }

  // oneOf allows what exactly one branch allows. Branches of different types never overlap, nor do
  // objects that require one property with different constants.
  void check_disjoint(const JsonValue& list, const std::string& place) const {
    for (size_t i = 0; i < list.size(); ++i) {
      for (size_t j = i + 1; j < list.size(); ++j) {
        const JsonValue &a = follow(list.items()[i]), &b = follow(list.items()[j]);
        if (!have_different_types(a, b) && !have_different_constants(a, b)) {
          refuse(place, fmt::format("the branches {} and {} of oneOf may overlap (anyOf is supported)", i, j));
        }
      }
    }
  }

  const JsonValue& follow(const JsonValue& schema) const {
    const JsonValue* at = &schema;
    for (int i = 0; i < limits_.max_depth; ++i) {
      const JsonValue* reference = at->find("$ref");
      if (reference == nullptr || !reference->is_string() || !reference->text().starts_with('#')) break;
      at = &resolve(reference->text(), "#");
    }
    return *at;
  }

  static std::set<std::string> declared_types(const JsonValue& schema) {
    std::set<std::string> types;
    const JsonValue* type = schema.find("type");
    const JsonValue* constant = schema.find("const");
    const JsonValue* values = schema.find("enum");
    const auto add = [&](const std::string& name) { types.insert(name == "integer" ? "number" : name); };
    const auto add_value = [&](const JsonValue& value) {
      add(value.is_number() ? "number" : value.is_bool() ? "boolean" : value.kind_name());
    };
    if (type != nullptr && type->is_string()) add(type->text());
    if (type != nullptr && type->is_array()) {
      for (const JsonValue& name : type->items()) add(name.text());
    }
    if (type == nullptr && constant != nullptr) add_value(*constant);
    if (type == nullptr && values != nullptr && values->is_array()) {
      for (const JsonValue& value : values->items()) add_value(value);
    }
    return types;
  }

  static bool have_different_types(const JsonValue& a, const JsonValue& b) {
    const std::set<std::string> x = declared_types(a), y = declared_types(b);
    const bool overlap = std::any_of(x.begin(), x.end(), [&](const std::string& type) { return y.contains(type); });
    return !x.empty() && !y.empty() && !overlap;
  }

  static std::vector<JsonValue> constants_of(const JsonValue& schema) {
    if (const JsonValue* constant = schema.find("const")) return {*constant};
    const JsonValue* values = schema.find("enum");
    return values != nullptr && values->is_array() ? values->items() : std::vector<JsonValue>{};
  }

  static bool requires_member(const JsonValue& schema, std::string_view name) {
    const JsonValue* required = schema.find("required");
    if (required == nullptr || !required->is_array()) return false;
    return std::any_of(required->items().begin(), required->items().end(), [&](const JsonValue& key) { return key.text() == name; });
  }

  static bool have_different_constants(const JsonValue& a, const JsonValue& b) {
    const JsonValue *x = a.find("properties"), *y = b.find("properties");
    if (x == nullptr || y == nullptr || !x->is_object()) return false;
    for (size_t i = 0; i < x->size(); ++i) {
      const std::string& name = x->keys()[i];
      const JsonValue* other = y->find(name);
      if (other == nullptr || !requires_member(a, name) || !requires_member(b, name)) continue;
      const auto first = constants_of(x->items()[i]), second = constants_of(*other);
      const bool overlap = std::any_of(first.begin(), first.end(), [&](const JsonValue& value) {
        return std::find(second.begin(), second.end(), value) != second.end();
      });
      if (!first.empty() && !second.empty() && !overlap) return true;
    }
    return false;
  }

  // --- constants

  Part listed(const JsonValue& schema, const std::string& at) {
    const JsonValue* values = schema.find("enum");
    const JsonValue* constant = schema.find("const");
    if (values != nullptr && constant != nullptr) refuse(at, "'enum' beside 'const' is not supported");
    if (values != nullptr && !values->is_array()) refuse(at + "/enum", "want a list of values");
    const std::vector<std::string> types = types_of(schema, at);
    const std::vector<JsonValue> candidates = values != nullptr ? values->items() : std::vector<JsonValue>{*constant};
    std::vector<Part> parts;
    for (const JsonValue& value : candidates) {
      if (types.empty() || has_type(value, types)) parts.push_back(constant_part(value));
    }
    if (parts.empty()) refuse(at, "no listed value has the declared type");
    return builder_.either(parts);
  }

  static bool has_type(const JsonValue& value, const std::vector<std::string>& types) {
    return std::any_of(types.begin(), types.end(), [&](const std::string& type) {
      if (type == "number") return value.is_number();
      if (type == "integer") return value.is_integer() || (value.is_number() && value.text().ends_with(".0"));
      return type == (value.is_bool() ? "boolean" : value.kind_name());
    });
  }

  // The value as it is printed, with the white space that other values may have.
  Part constant_part(const JsonValue& value) {
    if (!value.is_array() && !value.is_object()) return builder_.literal(value.dump());
    std::vector<Part> parts = {builder_.literal(value.is_array() ? "[" : "{"), space()};
    for (size_t i = 0; i < value.size(); ++i) {
      if (i > 0) parts.push_back(comma());
      if (value.is_object()) {
        parts.push_back(builder_.literal(JsonValue::string(value.keys()[i]).dump()));
        parts.push_back(colon());
      }
      parts.push_back(constant_part(value.items()[i]));
    }
    if (value.size() > 0) parts.push_back(space());
    parts.push_back(builder_.literal(value.is_array() ? "]" : "}"));
    return builder_.sequence(parts);
  }

  // --- scalars

  static int64_t count(const JsonValue& schema, const char* key, int64_t absent, const std::string& at) {
    const JsonValue* value = schema.find(key);
    if (value == nullptr) return absent;
    const double number = value->is_number() ? value->as_double() : -1;
    if (number < 0 || number != static_cast<double>(static_cast<int64_t>(number)) || number > kMaxCount) {
      refuse(fmt::format("{}/{}", at, key), fmt::format("{} is {}, want 0 to {}", key, value->dump(), kMaxCount));
    }
    return static_cast<int64_t>(number);
  }

  Part string_schema(const JsonValue& schema, const std::string& at) {
    const bool has_length = schema.find("minLength") != nullptr || schema.find("maxLength") != nullptr;
    const JsonValue* pattern = schema.find("pattern");
    std::string expression;
    bool whole = false;
    if (pattern != nullptr) {
      if (!pattern->is_string()) refuse(at + "/pattern", "want a string");
      expression = pattern->text();
    } else if (const JsonValue* format = schema.find("format")) {
      for (const auto& [name, form] : kFormats) {
        if (format->is_string() && format->text() == name) expression = form;
      }
      whole = true;
    }
    if (!expression.empty()) {
      if (has_length) refuse(at, "'minLength' or 'maxLength' beside 'pattern' or a held 'format' is not supported");
      return quoted(regex(expression, whole, at));
    }
    if (!has_length) return string();
    const int64_t min = count(schema, "minLength", 0, at), max = count(schema, "maxLength", -1, at);
    if (max >= 0 && max < min) refuse(at, "maxLength is below minLength");
    return quoted(builder_.repeat([&] { return grammar_json_char(builder_, UnicodeEscapes::kNo); }, min, max));
  }

  Part regex(const std::string& expression, bool whole, const std::string& at) {
    try {
      return grammar_regex(builder_, expression, {CharForm::kJsonString, whole});
    } catch (const Error& error) {
      M3_FAIL("{}/pattern: {} (docs/structured-output.md)", at, error.what());
    }
  }

  Part quoted(Part body) { return builder_.sequence({builder_.literal("\""), body, builder_.literal("\"")}); }

  Part number_schema(const JsonValue& schema, const std::string& at, bool integers) {
    NumberRange range;
    range.integers = integers;
    const auto read = [&](const char* key, bool inclusive, bool is_low, std::optional<NumberBound>& bound) {
      const JsonValue* value = schema.find(key);
      if (value == nullptr) return;
      if (!value->is_number()) refuse(fmt::format("{}/{}", at, key), "want a number");
      const bool is_tighter = !bound || (is_low ? value->as_double() >= bound->value.as_double()
                                                : value->as_double() <= bound->value.as_double());
      if (is_tighter) bound = NumberBound{*value, inclusive};
    };
    read("minimum", true, true, range.low);
    read("exclusiveMinimum", false, true, range.low);
    read("maximum", true, false, range.high);
    read("exclusiveMaximum", false, false, range.high);
    if (!range.low && !range.high) return integers ? shared("integer", [&] { return grammar_number(builder_, range); }) : number();
    try {
      return grammar_number(builder_, range);
    } catch (const Error& error) {
      refuse(at, error.what());
    }
  }

  // --- containers

  Part array(const JsonValue& schema, const std::string& at, int depth) {
    const int64_t min = count(schema, "minItems", 0, at);
    int64_t max = count(schema, "maxItems", -1, at);
    if (max >= 0 && max < min) refuse(at, "maxItems is below minItems");
    const JsonValue* items = schema.find("items");
    const JsonValue* by_position = schema.find("prefixItems");
    const bool has_more = items == nullptr || !items->is_bool() || items->as_bool();
    // A rule of its own, so that a repeated schema is compiled once.
    int item_rule = -1;
    const auto item = [&]() -> Part {
      if (items == nullptr || items->is_bool()) return any_value();
      if (item_rule < 0) {
        item_rule = builder_.add_rule();
        builder_.define_rule(item_rule, value(*items, at + "/items", depth + 1));
      }
      return builder_.call(item_rule);
    };
    if (by_position == nullptr) {
      if (!has_more) max = 0;
      if (max == 0 && min > 0) refuse(at, "items is false, but minItems asks for some");
      return list_of(item, min, max);
    }
    if (!by_position->is_array() || by_position->size() == 0) refuse(at + "/prefixItems", "want a list of schemas");
    const auto num_fixed = static_cast<int64_t>(by_position->size());
    if (!has_more) max = max < 0 ? num_fixed : std::min(max, num_fixed);
    if (max >= 0 && max < min) refuse(at, "minItems asks for more items than there are schemas");
    int64_t i = 0;
    return list_of(
        [&] {
          const int64_t position = i++;
          if (position >= num_fixed) return item();
          return value(by_position->items()[static_cast<size_t>(position)], fmt::format("{}/prefixItems/{}", at, position), depth + 1);
        },
        min, max, num_fixed);
  }

  Part object(const JsonValue& schema, const std::string& at, int depth) {
    const JsonValue* properties = schema.find("properties");
    const JsonValue* additional = schema.find("additionalProperties");
    if (properties != nullptr && !properties->is_object()) refuse(at + "/properties", "want an object of schemas");
    if (additional != nullptr && !additional->is_object() && !additional->is_bool()) {
      refuse(at + "/additionalProperties", "want a schema");
    }
    const size_t num_declared = properties == nullptr ? 0 : properties->size();
    std::set<std::string> required;
    if (const JsonValue* list = schema.find("required")) {
      if (!list->is_array()) refuse(at + "/required", "want a list of names");
      for (const JsonValue& name : list->items()) {
        if (num_declared == 0 || properties->find(name.text()) == nullptr) {
          refuse(at + "/required", fmt::format("'{}' is not declared in properties", name.text()));
        }
        required.insert(name.text());
      }
    }
    // Names that are not declared are only generated where the schema speaks of them, or declares none.
    const bool is_closed = additional == nullptr ? num_declared > 0 : additional->is_bool() && !additional->as_bool();
    if (num_declared == 0 && additional == nullptr) return any_object();

    // Members come in the order of their declaration. `bare`: nothing was written yet, `filled`: a comma
    // comes before the next one.
    const int begin = builder_.add_node();
    int bare = begin, filled = builder_.add_node();
    const auto add_member = [&](Part member) {
      const Part separator = comma();
      builder_.link(bare, member.begin);
      builder_.link(filled, separator.begin);
      builder_.link(separator.end, member.begin);
      return member.end;
    };
    for (size_t i = 0; i < num_declared; ++i) {
      const std::string& name = properties->keys()[i];
      const std::string place = at + "/properties/" + escape_pointer(name);
      const int behind = add_member(builder_.sequence(
          {builder_.literal(JsonValue::string(name).dump()), colon(), value(properties->items()[i], place, depth + 1)}));
      const int next_bare = builder_.add_node(), next_filled = builder_.add_node();
      builder_.link(behind, next_filled);
      if (!required.contains(name)) {
        builder_.link(bare, next_bare);
        builder_.link(filled, next_filled);
      }
      bare = next_bare;
      filled = next_filled;
    }
    if (!is_closed) {
      const bool any = additional == nullptr || additional->is_bool();
      const Part key = num_declared == 0 ? string() : other_key(properties->keys(), at);
      const Part member = any ? any_value() : value(*additional, at + "/additionalProperties", depth + 1);
      builder_.link(add_member(builder_.sequence({key, colon(), member})), filled);
    }
    const Part members{begin, builder_.add_node()};
    builder_.link(bare, members.end);
    builder_.link(filled, members.end);
    return builder_.sequence({builder_.literal("{"), space(), members, space(), builder_.literal("}")});
  }

  // A key that is none of the declared ones. It is written without escapes, so that no declared name can
  // hide in another spelling.
  Part other_key(const std::vector<std::string>& declared, const std::string& at) {
    constexpr size_t kMaxNameBytes = 256;
    std::vector<std::string_view> names;
    for (const std::string& name : declared) {
      if (name.size() > kMaxNameBytes) refuse(at, fmt::format("a property name of {} bytes beside additionalProperties", name.size()));
      if (JsonValue::string(name).dump().size() == name.size() + 2) names.push_back(name);
    }
    return quoted(none_of(names));
  }

  Part none_of(const std::vector<std::string_view>& names) {
    CharSet others = CharSet({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}});
    std::map<std::string_view, std::vector<std::string_view>> by_first;  // rests by their first character
    bool may_end = true;
    for (std::string_view name : names) {
      if (name.empty()) {
        may_end = false;
        continue;
      }
      const size_t length = utf8_step(name).length;
      by_first[name.substr(0, length)].push_back(name.substr(length));
    }
    std::vector<Part> parts;
    if (may_end) parts.push_back(builder_.empty());
    for (const auto& [first, rests] : by_first) {
      parts.push_back(builder_.sequence({builder_.literal(first), none_of(rests)}));
      const uint32_t character = read_utf8(first);
      others.add({character, character});
    }
    const auto any = [&] {
      return grammar_char(builder_, CharSet({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}).inverted(), CharForm::kRaw);
    };
    parts.push_back(builder_.sequence({grammar_char(builder_, others.inverted(), CharForm::kRaw), builder_.repeat(any, 0, -1)}));
    return builder_.either(parts);
  }

  GrammarBuilder builder_;
  const JsonValue& root_;
  JsonGrammarLimits limits_;
  std::map<std::string, int> shared_, references_;
};

}  // namespace

GrammarMachine json_schema_machine(const JsonValue& schema, const JsonGrammarLimits& limits) {
  return SchemaCompiler(schema, limits).compile();
}

GrammarMachine json_object_machine() {
  const JsonValue any = JsonValue::boolean(true);
  return SchemaCompiler(any, {}).compile_any_object();
}

}  // namespace m3
