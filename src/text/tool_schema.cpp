#include "text/tool_schema.h"

namespace m3 {

namespace {

constexpr int kMaxDepth = 32;
constexpr size_t kMaxBranches = 256;

unsigned type_bit(std::string_view name) {
  if (name == "string") return SchemaTypes::kString;
  if (name == "integer") return SchemaTypes::kInteger;
  if (name == "number") return SchemaTypes::kNumber;
  if (name == "boolean") return SchemaTypes::kBoolean;
  if (name == "null") return SchemaTypes::kNull;
  if (name == "array") return SchemaTypes::kArray;
  if (name == "object") return SchemaTypes::kObject;
  return 0;
}

unsigned type_bit(const JsonValue& value) {
  switch (value.kind()) {
    case JsonValue::Kind::kNull:
      return SchemaTypes::kNull;
    case JsonValue::Kind::kBool:
      return SchemaTypes::kBoolean;
    case JsonValue::Kind::kInteger:
      return SchemaTypes::kInteger;
    case JsonValue::Kind::kFloat:
      return SchemaTypes::kNumber;
    case JsonValue::Kind::kString:
      return SchemaTypes::kString;
    case JsonValue::Kind::kArray:
      return SchemaTypes::kArray;
    case JsonValue::Kind::kObject:
      return SchemaTypes::kObject;
  }
  return 0;
}

// `type`, else the types of `enum` or `const`, else what other keywords hint at.
SchemaTypes types_of(const JsonValue& branch) {
  SchemaTypes types;
  const auto add = [&](const JsonValue& name) {
    const unsigned bit = name.is_string() ? type_bit(name.text()) : 0;
    types.bits |= bit;
    types.has_unknown |= bit == 0;
  };
  if (const JsonValue* type = branch.find("type")) {
    if (type->is_array()) {
      for (const JsonValue& name : type->items()) add(name);
    } else {
      add(*type);
    }
  }
  if (types.empty()) {
    const JsonValue* values = branch.find("enum");
    const JsonValue* constant = branch.find("const");
    if (values != nullptr && values->is_array()) {
      for (const JsonValue& value : values->items()) types.bits |= type_bit(value);
    } else if (constant != nullptr) {
      types.bits |= type_bit(*constant);
    }
  }
  if (types.empty()) {
    if (branch.find("properties") != nullptr || branch.find("additionalProperties") != nullptr) {
      types.bits |= SchemaTypes::kObject;
    }
    if (branch.find("items") != nullptr || branch.find("prefixItems") != nullptr)
      types.bits |= SchemaTypes::kArray;
  }
  const JsonValue* nullable = branch.find("nullable");
  if (nullable != nullptr && nullable->is_bool() && nullable->as_bool())
    types.bits |= SchemaTypes::kNull;
  return types;
}

}  // namespace

ToolSchema::ToolSchema(const JsonValue* schema, const JsonValue* root)
    : root_(root), is_free_(schema == nullptr || !schema->is_object()) {
  flatten(schema, 0);
  for (const JsonValue* branch : branches_) {
    const SchemaTypes types = types_of(*branch);
    types_.bits |= types.bits;
    types_.has_unknown |= types.has_unknown;
  }
}

void ToolSchema::flatten(const JsonValue* schema, int depth) {
  if (schema == nullptr || !schema->is_object() || depth > kMaxDepth ||
      branches_.size() >= kMaxBranches)
    return;
  const JsonValue* reference = schema->find("$ref");
  if (reference != nullptr && reference->is_string() && !reference->text().empty()) {
    return flatten(resolve(reference->text()), depth + 1);
  }
  branches_.push_back(schema);
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const JsonValue* list = schema->find(key);
    if (list == nullptr || !list->is_array()) continue;
    for (const JsonValue& branch : list->items()) flatten(&branch, depth + 1);
  }
}

// "#/$defs/node": a path of keys from the root.
const JsonValue* ToolSchema::resolve(std::string_view reference) const {
  const JsonValue* target = root_;
  size_t at = 0;
  while (target != nullptr && at < reference.size()) {
    const size_t end = std::min(reference.find('/', at), reference.size());
    const std::string_view key = reference.substr(at, end - at);
    if (!key.empty() && key != "#") target = target->find(key);
    at = end + 1;
  }
  return target;
}

const JsonValue* ToolSchema::property(std::string_view name) const {
  const JsonValue* last = nullptr;
  for (const JsonValue* branch : branches_) {
    const JsonValue* properties = branch->find("properties");
    const JsonValue* found = properties == nullptr ? nullptr : properties->find(name);
    if (found != nullptr) last = found;
  }
  return last;
}

bool ToolSchema::has_properties() const {
  for (const JsonValue* branch : branches_) {
    const JsonValue* properties = branch->find("properties");
    if (properties != nullptr && properties->is_object() && properties->size() > 0) return true;
  }
  return false;
}

ToolSchema ToolSchema::member(std::string_view name) const {
  const JsonValue* found = property(name);
  for (size_t i = 0; found == nullptr && i < branches_.size(); ++i)
    found = branches_[i]->find("additionalProperties");
  return ToolSchema(found, root_);
}

ToolSchema ToolSchema::item(size_t index) const {
  for (const JsonValue* branch : branches_) {
    const JsonValue* by_position = branch->find("prefixItems");
    if (by_position != nullptr && by_position->is_array() && index < by_position->size()) {
      return ToolSchema(&by_position->items()[index], root_);
    }
    if (const JsonValue* items = branch->find("items")) return ToolSchema(items, root_);
  }
  return ToolSchema(nullptr, root_);
}

}  // namespace m3
