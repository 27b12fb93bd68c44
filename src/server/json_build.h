// Short ways to write JSON answers with JsonValue.
#pragma once
#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "text/json_value.h"

namespace m3 {

// What can stand as a value in json_object({{"n", 1}, {"text", "x"}, {"list",
// JsonValue::array()}}).
struct JsonArg {
  JsonValue value;
  JsonArg(JsonValue v) : value(std::move(v)) {}  // NOLINT: implicit on purpose, here and below
  JsonArg(std::nullptr_t) {}
  JsonArg(std::same_as<bool> auto v) : value(JsonValue::boolean(v)) {}
  JsonArg(int v) : value(JsonValue::integer(int64_t{v})) {}
  JsonArg(int64_t v) : value(JsonValue::integer(v)) {}
  JsonArg(double v) : value(JsonValue::number(v)) {}
  JsonArg(const char* v) : value(JsonValue::string(v)) {}
  JsonArg(std::string_view v) : value(JsonValue::string(std::string(v))) {}
  JsonArg(std::string v) : value(JsonValue::string(std::move(v))) {}
};

inline JsonValue json_object(std::initializer_list<std::pair<const char*, JsonArg>> members) {
  JsonValue object = JsonValue::object();
  for (const auto& [key, arg] : members) object.append_member(key, arg.value);
  return object;
}

inline JsonValue json_array(std::initializer_list<JsonArg> items) {
  JsonValue array = JsonValue::array();
  for (const JsonArg& item : items) array.push_back(item.value);
  return array;
}

}  // namespace m3
