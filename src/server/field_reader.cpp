#include "server/field_reader.h"

#include <fmt/core.h>

#include <charconv>
#include <cmath>

namespace m3 {

void refuse_field(const std::string& path, const std::string& message) {
  throw ApiError(400, fmt::format("{}: {}", path.empty() ? "the body" : path, message), path);
}

FieldReader::FieldReader(const JsonValue& object, std::string path)
    : object_(object), path_(std::move(path)) {
  if (!object.is_object()) {
    refuse_field(path_, fmt::format("is of type {}, want an object", object.kind_name()));
  }
}

std::string FieldReader::path(std::string_view key) const {
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

const JsonValue* FieldReader::take(std::string_view key) {
  taken_.emplace(key);
  const JsonValue* value = object_.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::optional<std::string> FieldReader::text(std::string_view key) {
  const JsonValue* value = take(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string())
    refuse_field(path(key), fmt::format("is of type {}, want a string", value->kind_name()));
  return value->text();
}

std::string FieldReader::required_text(std::string_view key) {
  auto value = text(key);
  if (!value) refuse_field(path(key), "is missing, want a string");
  return *std::move(value);
}

std::optional<bool> FieldReader::boolean(std::string_view key) {
  const JsonValue* value = take(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_bool())
    refuse_field(path(key), fmt::format("is of type {}, want true or false", value->kind_name()));
  return value->as_bool();
}

std::optional<int64_t> FieldReader::integer(std::string_view key, int64_t least, int64_t most) {
  const JsonValue* value = take(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_integer()) {
    refuse_field(path(key), fmt::format("is of type {}, want an integer", value->kind_name()));
  }
  const std::string& digits = value->text();
  int64_t number = 0;
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (problem != std::errc() || number < least || number > most) {
    refuse_field(path(key), fmt::format("is {}, want {} to {}", digits.substr(0, 24), least, most));
  }
  return number;
}

std::optional<double> FieldReader::number(std::string_view key, double least, double most) {
  const JsonValue* value = take(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number())
    refuse_field(path(key), fmt::format("is of type {}, want a number", value->kind_name()));
  const double number = value->as_double();
  if (!(number >= least && number <= most)) {
    refuse_field(path(key),
                 fmt::format("is {}, want {} to {}", value->text().substr(0, 24), least, most));
  }
  return number;
}

const JsonValue* FieldReader::array(std::string_view key) {
  const JsonValue* value = take(key);
  if (value != nullptr && !value->is_array()) {
    refuse_field(path(key), fmt::format("is of type {}, want a list", value->kind_name()));
  }
  return value;
}

const JsonValue* FieldReader::object(std::string_view key) {
  const JsonValue* value = take(key);
  if (value != nullptr && !value->is_object()) {
    refuse_field(path(key), fmt::format("is of type {}, want an object", value->kind_name()));
  }
  return value;
}

std::optional<std::string> FieldReader::word(std::string_view key,
                                             std::initializer_list<std::string_view> words) {
  auto value = text(key);
  if (!value) return std::nullopt;
  std::string wanted;
  for (const std::string_view word : words) {
    if (*value == word) return value;
    wanted += fmt::format("{}'{}'", wanted.empty() ? "" : ", ", word);
  }
  refuse_field(path(key), fmt::format("is '{}', want one of {}", value->substr(0, 64), wanted));
}

void FieldReader::accept(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) taken_.emplace(key);
}

void FieldReader::not_built(std::string_view key, std::string_view neutral) {
  const JsonValue* value = take(key);
  if (value == nullptr) return;
  const bool is_neutral = (value->is_bool() && !value->as_bool()) ||
                          (value->is_number() && value->as_double() == 0) ||
                          ((value->is_array() || value->is_object()) && value->size() == 0) ||
                          (value->is_string() && !neutral.empty() && value->text() == neutral);
  if (!is_neutral)
    refuse_field(path(key), "this is not supported by this server; leave the field out");
}

std::vector<std::string> FieldReader::unknown() const {
  std::vector<std::string> paths;
  for (const std::string& key : object_.keys()) {
    if (!taken_.contains(key)) paths.push_back(path(key));
  }
  return paths;
}

void FieldReader::refuse_unknown() const {
  const auto paths = unknown();
  if (!paths.empty()) refuse_field(paths.front(), "is not known here");
}

}  // namespace m3
