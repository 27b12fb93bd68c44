#include "formats/json_fields.h"

#include <fmt/format.h>

#include "base/check.h"

namespace m3 {

using nlohmann::json;

namespace {

constexpr int kMaxDepth = 32;  // of any file that we read this way; also bounds recursion in dump()

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 100) text = text.substr(0, 100) + "...";
  return text;
}

}  // namespace

json parse_json(std::string_view text, const std::string& file) {
  M3_CHECK(text.size() <= kMaxJsonBytes, "{}: {} bytes, more than the limit of {}", file, text.size(), kMaxJsonBytes);
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    M3_CHECK(depth <= kMaxDepth, "{}: nested deeper than {} levels", file, kMaxDepth);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      M3_CHECK(keys.back().insert(value.get<std::string>()).second, "{}: key {} appears twice in one object", file,
               shown(value));
    }
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& error) {
    M3_FAIL("{}: not valid JSON: {}", file, error.what());
  }
}

JsonFields::JsonFields(const json& object, std::string file, std::string path)
    : object_(&object), file_(std::move(file)), path_(std::move(path)) {
  M3_CHECK(object.is_object(), "{}: {} is {}; want an object", file_, path_.empty() ? "the file" : path_,
           shown(object));
}

const json* JsonFields::find(const char* key) const {
  const auto at = object_->find(key);
  return at == object_->end() || at->is_null() ? nullptr : &*at;
}

const json* JsonFields::take(const char* key) {
  taken_.insert(key);
  return find(key);
}

std::string JsonFields::name(const char* key) const {
  return path_.empty() ? fmt::format("{}: {}", file_, key) : fmt::format("{}: {}.{}", file_, path_, key);
}

void JsonFields::refuse(const char* key, const std::string& wanted) const {
  const json* value = find(key);
  M3_FAIL("{} is {}; {}", name(key), value ? shown(*value) : "absent", wanted);
}

void JsonFields::missing(const char* key) const { M3_FAIL("{} is missing", name(key)); }

std::optional<int64_t> JsonFields::integer(const char* key, int64_t low, int64_t high) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  // An unsigned number above int64 would wrap in the conversion.
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t{INT64_MAX});
  if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    refuse(key, fmt::format("want a whole number from {} to {}", low, high));
  }
  return value->get<int64_t>();
}

std::optional<double> JsonFields::number(const char* key, double low, double high) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_number() || !(value->get<double>() >= low && value->get<double>() <= high)) {
    refuse(key, fmt::format("want a number from {} to {}", low, high));
  }
  return value->get<double>();
}

std::optional<bool> JsonFields::boolean(const char* key) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "want true or false");
  return value->get<bool>();
}

std::optional<std::string> JsonFields::text(const char* key) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse(key, "want text");
  return value->get<std::string>();
}

std::optional<std::vector<std::string>> JsonFields::texts(const char* key, size_t count) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_array()) refuse(key, "want a list of texts");
  std::vector<std::string> list;
  for (const json& item : *value) {
    if (!item.is_string()) refuse(key, "want a list of texts");
    list.push_back(item.get<std::string>());
  }
  M3_CHECK(count == 0 || list.size() == count, "{} has {} entries; want {}", name(key), list.size(), count);
  return list;
}

std::optional<std::vector<int64_t>> JsonFields::integers(const char* key, int64_t low, int64_t high, size_t count) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  const std::string wanted = fmt::format("want a list of whole numbers from {} to {}", low, high);
  if (!value->is_array()) refuse(key, wanted);
  std::vector<int64_t> list;
  for (const json& item : *value) {
    if (!item.is_number_integer() || item.get<int64_t>() < low || item.get<int64_t>() > high) {
      M3_FAIL("{}[{}] is {}; {}", name(key), list.size(), shown(item), wanted);
    }
    list.push_back(item.get<int64_t>());
  }
  M3_CHECK(count == 0 || list.size() == count, "{} has {} entries; want {}", name(key), list.size(), count);
  return list;
}

std::optional<JsonFields> JsonFields::object(const char* key) {
  const json* value = take(key);
  if (!value) return std::nullopt;
  return JsonFields(*value, file_, path_.empty() ? key : path_ + "." + key);
}

std::vector<JsonFields> JsonFields::objects(const char* key) {
  std::vector<JsonFields> list;
  const json* value = take(key);
  if (!value) return list;
  if (!value->is_array()) refuse(key, "want a list of objects");
  for (const json& item : *value) {
    const std::string place = fmt::format("{}[{}]", key, list.size());
    list.emplace_back(item, file_, path_.empty() ? place : path_ + "." + place);
  }
  return list;
}

void JsonFields::only(const char* key, bool wanted) {
  const auto value = boolean(key);
  if (value && *value != wanted) refuse(key, fmt::format("only {} is supported", wanted));
}

void JsonFields::only(const char* key, double wanted) {
  const json* value = take(key);
  if (value && !(value->is_number() && value->get<double>() == wanted)) {
    refuse(key, fmt::format("only {} is supported", wanted));
  }
}

void JsonFields::only(const char* key, std::initializer_list<const char*> wanted) {
  const auto value = text(key);
  if (!value) return;
  std::string list;
  for (const char* word : wanted) {
    if (*value == word) return;
    list += (list.empty() ? "" : " or ") + std::string("\"") + word + "\"";
  }
  refuse(key, fmt::format("only {} is supported", list));
}

void JsonFields::only_absent(const char* key) {
  if (take(key)) refuse(key, "not supported: the key must be absent or null");
}

void JsonFields::skip(std::initializer_list<const char*> keys) {
  for (const char* key : keys) taken_.insert(key);
}

void JsonFields::list_unknown(std::vector<std::string>& names) const {
  for (const auto& [key, value] : object_->items()) {
    if (!taken_.contains(key)) names.push_back(path_.empty() ? key : path_ + "." + key);
  }
}

void JsonFields::refuse_unknown() const {
  std::vector<std::string> unknown;
  list_unknown(unknown);
  if (unknown.empty()) return;
  M3_FAIL("{}: unknown key {}; the keys here are {}", file_, unknown[0], fmt::join(taken_, ", "));
}

}  // namespace m3
