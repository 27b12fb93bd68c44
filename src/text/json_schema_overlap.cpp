#include "text/json_schema_overlap.h"

#include <algorithm>
#include <set>

namespace m3 {

namespace {

std::vector<JsonValue> list_of(const JsonValue& schema, std::string_view key) {
  const JsonValue* list = schema.find(key);
  return list != nullptr && list->is_array() ? list->items() : std::vector<JsonValue>{};
}

std::vector<JsonValue> constants_of(const JsonValue& schema) {
  std::vector<JsonValue> values = list_of(schema, "enum");
  if (const JsonValue* constant = schema.find("const")) values = {*constant};
  for (JsonValue& value : values) {
    if (value.is_number()) value = JsonValue::number(value.as_double());  // 1 and 1.0 are equal
  }
  return values;
}

// Empty: any type.
std::set<std::string> types_of(const JsonValue& schema) {
  std::set<std::string> types;
  const auto add = [&](const std::string& name) {
    types.insert(name == "integer" ? "number" : name);
  };
  if (const JsonValue* type = schema.find("type")) {
    if (type->is_string()) add(type->text());
    for (const JsonValue& name : list_of(schema, "type")) add(name.text());
  } else {
    for (const JsonValue& value : constants_of(schema)) {
      add(value.is_number() ? "number" : value.is_bool() ? "boolean" : value.kind_name());
    }
  }
  const JsonValue* nullable = schema.find("nullable");
  if (!types.empty() && nullable != nullptr && nullable->as_bool()) types.insert("null");
  return types;
}

template <typename List>
bool share_nothing(const List& a, const List& b) {
  if (a.empty() || b.empty()) return false;
  return std::none_of(a.begin(), a.end(), [&](const auto& value) {
    return std::find(b.begin(), b.end(), value) != b.end();
  });
}

bool requires_member(const JsonValue& schema, std::string_view name) {
  const auto required = list_of(schema, "required");
  return std::any_of(required.begin(), required.end(),
                     [&](const JsonValue& key) { return key.text() == name; });
}

}  // namespace

bool schemas_are_disjoint(const JsonValue& a, const JsonValue& b) {
  if (share_nothing(types_of(a), types_of(b))) return true;
  const auto may_be_other = [](const JsonValue& schema) {
    const auto types = types_of(schema);
    return schema.find("nullable") != nullptr ||
           (!types.empty() && types != std::set<std::string>{"object"});
  };
  if (may_be_other(a) || may_be_other(b)) return false;
  const JsonValue *properties = a.find("properties"), *others = b.find("properties");
  if (properties == nullptr || others == nullptr || !properties->is_object()) return false;
  for (size_t i = 0; i < properties->size(); ++i) {
    const std::string& name = properties->keys()[i];
    const JsonValue* other = others->find(name);
    if (other == nullptr || !requires_member(a, name) || !requires_member(b, name)) continue;
    if (share_nothing(constants_of(properties->items()[i]), constants_of(*other))) return true;
  }
  return false;
}

}  // namespace m3
