#include "text/json_schema_compiler.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/check.h"
#include "text/grammar_regex.h"
#include "text/json_schema_numbers.h"
#include "text/json_schema_overlap.h"

namespace m3 {

using Part = GrammarBuilder::Part;

namespace {

// Keywords without influence on what is valid ("nullable" is read by itself).
constexpr std::string_view kAnnotations[] = {
    "title",    "description", "default",         "examples",
    "example",  "deprecated",  "readOnly",        "writeOnly",
    "$schema",  "$id",         "$comment",        "$anchor",
    "$defs",    "definitions", "contentEncoding", "contentMediaType",
    "nullable", "xml",         "externalDocs",    "discriminator"};

// The keywords that are held, by the type that they speak of.
const std::map<std::string_view, std::vector<std::string_view>> kKeywords = {
    {"object", {"properties", "required", "additionalProperties"}},
    {"array", {"items", "prefixItems", "minItems", "maxItems"}},
    {"string", {"minLength", "maxLength", "pattern", "format"}},
    {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
    {"integer", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
    {"boolean", {}},
    {"null", {}}};

// Strings of these formats are held to their form; other formats are annotations, as the standard
// has it.
#define M3_DATE R"([0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01]))"
#define M3_TIME \
  R"((?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
#define M3_BYTE R"((?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9]))"
constexpr std::pair<std::string_view, std::string_view> kFormats[] = {
    {"date", M3_DATE},
    {"time", M3_TIME},
    {"date-time", M3_DATE "T" M3_TIME},
    {"uuid", R"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"},
    {"ipv4", "(?:" M3_BYTE "\\.){3}" M3_BYTE}};
#undef M3_DATE
#undef M3_TIME
#undef M3_BYTE

constexpr int64_t kMaxCount = 1000;  // of minLength, maxItems and the like
constexpr int kMaxDepth = 64;        // of nested schemas

bool is_one_of(const auto& list, std::string_view word) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

bool is_annotation(std::string_view key) {
  return key.starts_with("x-") || is_one_of(kAnnotations, key);
}

bool is_true(const JsonValue* value) {
  return value != nullptr && value->is_bool() && value->as_bool();
}
bool is_false(const JsonValue* value) {
  return value != nullptr && value->is_bool() && !value->as_bool();
}

std::string unescape_pointer(const std::string& part) {
  std::string out;
  for (size_t i = 0; i < part.size(); ++i) {
    const bool is_escape =
        part[i] == '~' && i + 1 < part.size() && (part[i + 1] == '0' || part[i + 1] == '1');
    out += is_escape ? (part[i + 1] == '0' ? '~' : '/') : part[i];
    i += is_escape ? 1 : 0;
  }
  return out;
}

}  // namespace

JsonSchemaCompiler::Place JsonSchemaCompiler::Place::at(std::string_view key) const {
  Place next{pointer + "/", depth + 1, form};
  for (char c : key) next.pointer += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return next;
}

void JsonSchemaCompiler::refuse(const Place& place, std::string_view why) {
  M3_FAIL("{}: {}; structured output cannot hold it (docs/structured-output.md)", place.pointer,
          why);
}

JsonSchemaCompiler::JsonSchemaCompiler(GrammarBuilder& builder, JsonGrammarParts& parts,
                                       const JsonValue& root, std::string name,
                                       int32_t namespace_id)
    : builder_(builder),
      parts_(parts),
      root_(root),
      name_(std::move(name)),
      namespace_id_(namespace_id) {}

Part JsonSchemaCompiler::value() {
  return value(root_, {name_, 0, Form::kJson});
}

Part JsonSchemaCompiler::parameters() {
  const Place place{name_, 0, Form::kTags};
  const JsonValue& schema = follow(root_, place);
  const std::vector<std::string> types = types_of(schema, place);
  if (!types.empty() && types != std::vector<std::string>{"object"})
    refuse(place, "parameters must be an object");
  check_keywords(schema, place, types);
  return members(schema, place, true);
}

// --- any schema

Part JsonSchemaCompiler::value(const JsonValue& schema, const Place& place) {
  if (place.depth > 2 * kMaxDepth)
    refuse(place, fmt::format("the schema is nested more than {} deep", kMaxDepth));
  if (is_false(&schema)) refuse(place, "nothing satisfies the schema false");
  if (is_true(&schema)) return free_value(place);
  if (!schema.is_object())
    refuse(place, fmt::format("a schema is of type {}, want an object", schema.kind_name()));
  const Part part = constrained_value(schema, place);
  return is_true(schema.find("nullable")) ? builder_.either({part, builder_.literal("null")})
                                          : part;
}

Part JsonSchemaCompiler::free_value(const Place& place) {
  return place.form == Form::kTags ? parts_.text() : parts_.any_value();
}

Part JsonSchemaCompiler::constrained_value(const JsonValue& schema, const Place& place) {
  if (const JsonValue* reference = schema.find("$ref")) {
    allow_only(schema, place, {"$ref"});
    return referenced(*reference, place);
  }
  if (schema.find("enum") != nullptr || schema.find("const") != nullptr) {
    allow_only(schema, place, {"enum", "const", "type"});
    return listed(schema, place);
  }
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    if (const JsonValue* list = schema.find(key)) {
      allow_only(schema, place, {key});
      return combined(key, *list, place.at(key));
    }
  }
  const std::vector<std::string> types = types_of(schema, place);
  check_keywords(schema, place, types);
  if (types.empty()) return free_value(place);
  std::vector<Part> parts;
  for (const std::string& type : types) parts.push_back(typed(type, schema, place));
  return parts.size() == 1 ? parts[0] : builder_.either(parts);
}

void JsonSchemaCompiler::allow_only(const JsonValue& schema, const Place& place,
                                    std::initializer_list<std::string_view> allowed) {
  for (const std::string& key : schema.keys()) {
    if (is_annotation(key) || is_one_of(allowed, key)) continue;
    refuse(place.at(key), fmt::format("'{}' beside '{}' is not supported", key, *allowed.begin()));
  }
}

// Every keyword must be one that is held.
void JsonSchemaCompiler::check_keywords(const JsonValue& schema, const Place& place,
                                        const std::vector<std::string>& types) {
  for (size_t i = 0; i < schema.size(); ++i) {
    const std::string& key = schema.keys()[i];
    const JsonValue& value = schema.items()[i];
    const auto speaks_of = [&](const auto& entry) { return is_one_of(entry.second, key); };
    if (key == "type" || is_annotation(key) ||
        std::any_of(kKeywords.begin(), kKeywords.end(), speaks_of))
      continue;
    const bool is_integer = types == std::vector<std::string>{"integer"};
    const bool has_no_effect =
        (key == "uniqueItems" && is_false(&value)) ||
        (key == "multipleOf" && is_integer && value.is_integer() && value.text() == "1");
    if (!has_no_effect)
      refuse(place.at(key), fmt::format("the keyword '{}' is not supported", key));
  }
}

// `type`, or what the keywords speak of.
std::vector<std::string> JsonSchemaCompiler::types_of(const JsonValue& schema, const Place& place) {
  std::vector<std::string> types;
  const auto add = [&](const JsonValue& name) {
    if (!name.is_string() || !kKeywords.contains(name.text())) {
      refuse(place.at("type"), fmt::format("unknown type {}", name.dump()));
    }
    if (!is_one_of(types, name.text())) types.push_back(name.text());
  };
  if (const JsonValue* type = schema.find("type")) {
    if (type->is_array()) {
      for (const JsonValue& name : type->items()) add(name);
      if (types.empty()) refuse(place.at("type"), "an empty list of types");
    } else {
      add(*type);
    }
  } else {
    for (const char* type : {"object", "array", "string", "number"}) {
      const auto& keywords = kKeywords.at(type);
      if (std::any_of(schema.keys().begin(), schema.keys().end(),
                      [&](const auto& key) { return is_one_of(keywords, key); })) {
        types.push_back(type);
      }
    }
  }
  if (is_one_of(types, "number")) std::erase(types, "integer");  // every integer is a number
  return types;
}

Part JsonSchemaCompiler::typed(const std::string& type, const JsonValue& schema,
                               const Place& place) {
  if (type == "object") return object(schema, place);
  if (type == "array") return array(schema, place);
  if (type == "string") return string(schema, place);
  if (type == "boolean") return parts_.boolean();
  if (type == "null") return builder_.literal("null");
  return number(schema, place, type == "integer");
}

// --- references and combinations

Part JsonSchemaCompiler::referenced(const JsonValue& reference, const Place& place) {
  if (!reference.is_string() || !reference.text().starts_with('#')) {
    refuse(place.at("$ref"), "only references into the same schema (#/...) are supported");
  }
  const auto [rule, is_new] = references_.try_emplace({reference.text(), place.form}, 0);
  if (is_new) {
    rule->second = builder_.add_rule();
    const std::string pointer = name_ + reference.text().substr(1);
    builder_.define_rule(rule->second, value(resolve(reference.text(), place),
                                             {pointer, place.depth + 1, place.form}));
  }
  return builder_.call(rule->second);
}

const JsonValue& JsonSchemaCompiler::resolve(const std::string& reference,
                                             const Place& place) const {
  const JsonValue* target = &root_;
  for (size_t from = 1; from < reference.size();) {
    if (reference[from] != '/')
      refuse(place.at("$ref"), fmt::format("anchors are not supported: '{}'", reference));
    const size_t end = std::min(reference.find('/', from + 1), reference.size());
    const std::string key = unescape_pointer(reference.substr(from + 1, end - from - 1));
    const bool is_index =
        !key.empty() && key.size() < 9 && key.find_first_not_of("0123456789") == key.npos;
    if (target->is_array() && is_index && std::stoul(key) < target->size()) {
      target = &target->items()[std::stoul(key)];
    } else {
      target = target->find(key);
    }
    if (target == nullptr) refuse(place.at("$ref"), fmt::format("'{}' leads nowhere", reference));
    from = end;
  }
  return *target;
}

const JsonValue& JsonSchemaCompiler::follow(const JsonValue& schema, const Place& place) const {
  const JsonValue* at = &schema;
  for (int i = 0; i < kMaxDepth; ++i) {
    const JsonValue* reference = at->find("$ref");
    if (reference == nullptr || !reference->is_string() || !reference->text().starts_with('#'))
      break;
    at = &resolve(reference->text(), place);
  }
  return *at;
}

Part JsonSchemaCompiler::combined(const std::string& key, const JsonValue& list,
                                  const Place& place) {
  if (!list.is_array() || list.size() == 0) refuse(place, "want a list of schemas");
  if (key == "allOf" && list.size() > 1) refuse(place, "more than one schema in allOf");
  for (size_t i = 0; key == "oneOf" && i < list.size();
       ++i) {  // allows what exactly one branch allows
    for (size_t j = i + 1; j < list.size(); ++j) {
      if (schemas_are_disjoint(follow(list.items()[i], place), follow(list.items()[j], place)))
        continue;
      refuse(place,
             fmt::format("the branches {} and {} of oneOf may overlap (anyOf is supported)", i, j));
    }
  }
  std::vector<Part> parts;
  for (size_t i = 0; i < list.size(); ++i)
    parts.push_back(value(list.items()[i], place.at(std::to_string(i))));
  return parts.size() == 1 ? parts[0] : builder_.either(parts);
}

Part JsonSchemaCompiler::listed(const JsonValue& schema, const Place& place) {
  const JsonValue *values = schema.find("enum"), *constant = schema.find("const");
  if (values != nullptr && constant != nullptr)
    refuse(place, "'enum' beside 'const' is not supported");
  if (values != nullptr && !values->is_array()) refuse(place.at("enum"), "want a list of values");
  const std::vector<std::string> types = types_of(schema, place);
  const auto has_type = [&](const JsonValue& value, const std::string& type) {
    if (type == "number") return value.is_number();
    if (type == "integer")
      return value.is_integer() || (value.is_number() && value.text().ends_with(".0"));
    return type == (value.is_bool() ? "boolean" : value.kind_name());
  };
  std::vector<Part> parts;
  for (const JsonValue& value :
       values != nullptr ? values->items() : std::vector<JsonValue>{*constant}) {
    const bool fits =
        types.empty() || std::any_of(types.begin(), types.end(),
                                     [&](const auto& type) { return has_type(value, type); });
    if (!fits) continue;
    const bool is_bare = place.form == Form::kTags && value.is_string();
    parts.push_back(is_bare ? builder_.literal(value.text()) : parts_.constant(value));
  }
  if (parts.empty()) refuse(place, "no listed value has the declared type");
  return builder_.either(parts);
}

// --- scalars

int64_t JsonSchemaCompiler::count(const JsonValue& schema, const char* key, int64_t absent,
                                  const Place& place) {
  const JsonValue* value = schema.find(key);
  if (value == nullptr) return absent;
  const double number = value->is_number() ? value->as_double() : -1;
  if (number < 0 || number > kMaxCount ||
      number != static_cast<double>(static_cast<int64_t>(number))) {
    refuse(place.at(key), fmt::format("{} is {}, want 0 to {}", key, value->dump(), kMaxCount));
  }
  return static_cast<int64_t>(number);
}

Part JsonSchemaCompiler::string(const JsonValue& schema, const Place& place) {
  const auto quoted = [&](Part body) {
    return place.form == Form::kTags ? body : parts_.quoted(body);
  };
  const bool has_length =
      schema.find("minLength") != nullptr || schema.find("maxLength") != nullptr;
  const JsonValue *pattern = schema.find("pattern"), *format = schema.find("format");
  std::optional<std::string> expression;
  if (pattern != nullptr) {
    if (!pattern->is_string()) refuse(place.at("pattern"), "want a string");
    expression = pattern->text();
  } else if (format != nullptr && format->is_string()) {
    for (const auto& [name, form] : kFormats) {
      if (format->text() == name) expression = form;
    }
  }
  if (expression) {
    if (has_length) refuse(place, "a length beside 'pattern' or a held 'format' is not supported");
    return quoted(regex(*expression, pattern == nullptr, place.at("pattern")));
  }
  if (!has_length) return place.form == Form::kTags ? parts_.text() : parts_.string();
  const int64_t min = count(schema, "minLength", 0, place),
                max = count(schema, "maxLength", -1, place);
  if (max >= 0 && max < min) refuse(place, "maxLength is below minLength");
  const auto character = [&] {
    return place.form == Form::kTags ? grammar_char(builder_, CharSet::all(), CharForm::kRaw)
                                     : grammar_json_char(builder_, UnicodeEscapes::kNo);
  };
  return quoted(builder_.repeat(character, min, max));
}

Part JsonSchemaCompiler::regex(const std::string& expression, bool whole, const Place& place) {
  try {
    return grammar_regex(
        builder_, expression,
        {place.form == Form::kTags ? CharForm::kRaw : CharForm::kJsonString, whole});
  } catch (const Error& error) {
    refuse(place, error.what());
  }
}

Part JsonSchemaCompiler::number(const JsonValue& schema, const Place& place, bool integers) {
  NumberRange range;
  range.integers = integers;
  const auto read = [&](const char* key, bool inclusive, bool is_low,
                        std::optional<NumberBound>& bound) {
    const JsonValue* value = schema.find(key);
    if (value == nullptr) return;
    if (!value->is_number()) refuse(place.at(key), "want a number");
    const double now = value->as_double(), before = bound ? bound->value.as_double() : now;
    if (!bound || (is_low ? now >= before : now <= before)) bound = NumberBound{*value, inclusive};
  };
  read("minimum", true, true, range.low);
  read("exclusiveMinimum", false, true, range.low);
  read("maximum", true, false, range.high);
  read("exclusiveMaximum", false, false, range.high);
  if (!range.low && !range.high) return integers ? parts_.integer() : parts_.number();
  try {
    return grammar_number(builder_, range);
  } catch (const Error& error) {
    refuse(place, error.what());
  }
}

// --- containers

Part JsonSchemaCompiler::array(const JsonValue& schema, const Place& place) {
  const int64_t min = count(schema, "minItems", 0, place);
  int64_t max = count(schema, "maxItems", -1, place);
  const JsonValue *items = schema.find("items"), *by_position = schema.find("prefixItems");
  if (by_position != nullptr && (!by_position->is_array() || by_position->size() == 0)) {
    refuse(place.at("prefixItems"), "want a list of schemas");
  }
  const int64_t num_fixed = by_position == nullptr ? 0 : static_cast<int64_t>(by_position->size());
  if (is_false(items)) max = max < 0 ? num_fixed : std::min(max, num_fixed);
  if (max >= 0 && max < min) refuse(place, "more items are asked for than are allowed");

  int rule = -1;  // of an item, so that a repeated schema is compiled once
  int64_t position = 0;
  const auto item = [&]() -> Part {
    if (position < num_fixed) {
      const Place here = place.at("prefixItems", std::to_string(position));
      return value(by_position->items()[static_cast<size_t>(position++)], here);
    }
    if (items == nullptr || items->is_bool()) return free_value(place);
    if (rule < 0) {
      rule = builder_.add_rule();
      builder_.define_rule(rule, value(*items, place.at("items")));
    }
    return builder_.call(rule);
  };
  if (place.form == Form::kJson)
    return parts_.list_of(item, min, max, std::max<int64_t>(num_fixed, 1));
  const auto next = [&] { return tagged("item", item(), place); };
  Part rest = builder_.empty();
  std::vector<Part> fixed;
  const int64_t num_written = max < 0 ? num_fixed : std::min(num_fixed, max);
  for (int64_t i = 0; i < num_written; ++i) fixed.push_back(next());
  rest = builder_.repeat(next, std::max<int64_t>(min - num_written, 0),
                         max < 0 ? -1 : max - num_written);
  for (int64_t i = num_written - 1; i >= 0; --i) {
    rest = builder_.sequence({fixed[static_cast<size_t>(i)], rest});
    if (i >= min) rest = builder_.optional(rest);
  }
  return rest;
}

Part JsonSchemaCompiler::object(const JsonValue& schema, const Place& place) {
  const JsonValue *properties = schema.find("properties"),
                  *additional = schema.find("additionalProperties");
  if (properties != nullptr && !properties->is_object())
    refuse(place.at("properties"), "want an object of schemas");
  if (additional != nullptr && !additional->is_object() && !additional->is_bool()) {
    refuse(place.at("additionalProperties"), "want a schema");
  }
  const bool has_names = properties != nullptr && properties->size() > 0;
  const JsonValue* required = schema.find("required");
  const bool requires_none = required == nullptr || (required->is_array() && required->size() == 0);
  if (!has_names && additional == nullptr && requires_none) return parts_.any_object();
  // Names that are not declared are only generated where the schema speaks of them.
  const bool is_closed = additional == nullptr || is_false(additional);
  if (place.form == Form::kTags && is_closed) return members(schema, place, true);
  // Tags cannot hold names that nobody knows; a JSON text can, and is understood as well.
  const Place json{place.pointer, place.depth, Form::kJson};
  return builder_.sequence({builder_.literal("{"), parts_.space(), members(schema, json, is_closed),
                            parts_.space(), builder_.literal("}")});
}

// The members in the order of their declaration. `bare`: nothing was written yet; `filled`: a comma
// comes before the next one (JSON).
Part JsonSchemaCompiler::members(const JsonValue& schema, const Place& place, bool is_closed) {
  const JsonValue* properties = schema.find("properties");
  const size_t num_declared = properties == nullptr ? 0 : properties->size();
  std::set<std::string> required;
  if (const JsonValue* list = schema.find("required")) {
    if (!list->is_array()) refuse(place.at("required"), "want a list of names");
    for (const JsonValue& name : list->items()) {
      if (num_declared == 0 || properties->find(name.text()) == nullptr) {
        refuse(place.at("required"),
               fmt::format("'{}' is not declared in properties", name.text()));
      }
      required.insert(name.text());
    }
  }
  const int begin = builder_.add_node();
  int bare = begin, filled = builder_.add_node();
  const auto write = [&](Part part) {
    const Part separator = place.form == Form::kJson ? parts_.comma() : builder_.empty();
    builder_.link(bare, part.begin);
    builder_.link(filled, separator.begin);
    builder_.link(separator.end, part.begin);
    return part.end;
  };
  for (size_t i = 0; i < num_declared; ++i) {
    const std::string& name = properties->keys()[i];
    const int behind =
        write(member(name, value(properties->items()[i], place.at("properties", name)), place));
    const int next_bare = builder_.add_node(), next_filled = builder_.add_node();
    builder_.link(behind, next_filled);
    if (!required.contains(name)) {
      builder_.link(bare, next_bare);
      builder_.link(filled, next_filled);
    }
    bare = next_bare;
    filled = next_filled;
  }
  if (!is_closed)
    builder_.link(write(other_member(properties, schema.find("additionalProperties"), place)),
                  filled);
  const Part all{begin, builder_.add_node()};
  builder_.link(bare, all.end);
  builder_.link(filled, all.end);
  return all;
}

Part JsonSchemaCompiler::member(const std::string& name, Part value, const Place& place) {
  if (place.form == Form::kTags) return tagged(name, value, place);
  return builder_.sequence(
      {builder_.literal(JsonValue::string(name).dump()), parts_.colon(), value});
}

// A member under a name that is not declared. The name is written without escapes, so that no
// declared one can hide in another spelling.
Part JsonSchemaCompiler::other_member(const JsonValue* properties, const JsonValue* additional,
                                      const Place& place) {
  constexpr size_t kMaxNameBytes = 256;
  std::vector<std::string_view> names;
  for (size_t i = 0; properties != nullptr && i < properties->size(); ++i) {
    const std::string& name = properties->keys()[i];
    if (name.size() > kMaxNameBytes)
      refuse(place, fmt::format("a name of {} bytes beside additionalProperties", name.size()));
    if (JsonValue::string(name).dump().size() == name.size() + 2) names.push_back(name);
  }
  const Part key =
      names.empty() ? parts_.string()
                    : parts_.quoted(parts_.none_of(names, {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}));
  const Part any = is_true(additional) ? parts_.any_value()
                                       : value(*additional, place.at("additionalProperties"));
  return builder_.sequence({key, parts_.colon(), any});
}

Part JsonSchemaCompiler::tagged(const std::string& name, Part value, const Place& place) {
  if (name.empty() || name.find_first_of("<>\n") != name.npos || name.starts_with('/')) {
    refuse(place, fmt::format("the name '{}' cannot stand in a tag", name));
  }
  return builder_.sequence(
      {builder_.token(namespace_id_), builder_.literal(fmt::format("<{}>", name)), value,
       builder_.token(namespace_id_), builder_.literal(fmt::format("</{}>", name))});
}

}  // namespace m3
