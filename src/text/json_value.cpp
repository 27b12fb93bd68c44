#include "text/json_value.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/check.h"

namespace m3 {

namespace {

// repr(float) of Python: the shortest digits that read back, with an exponent below 1e-4 and from
// 1e16.
std::string python_float(double value) {
  char buffer[32];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  const std::string_view shortest(buffer, static_cast<size_t>(end - buffer));
  const size_t e = shortest.find('e');
  std::string sign, digits;
  for (char c : shortest.substr(0, e)) {
    if (c == '-') sign = "-";
    if (c >= '0' && c <= '9') digits += c;
  }
  int exponent = 0;
  const char* exponent_text = buffer + e + 1;
  std::from_chars(*exponent_text == '+' ? exponent_text + 1 : exponent_text, end, exponent);
  if (exponent < -4 || exponent >= 16) {
    const std::string fraction = digits.size() > 1 ? "." + digits.substr(1) : "";
    return fmt::format("{}{}{}e{}{:02}", sign, digits[0], fraction, exponent < 0 ? '-' : '+',
                       std::abs(exponent));
  }
  if (exponent < 0)
    return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() < whole) digits.append(whole - digits.size(), '0');
  return sign + digits.substr(0, whole) + "." +
         (digits.size() > whole ? digits.substr(whole) : "0");
}

std::string canonical_integer(std::string_view digits) {
  const bool negative = digits.starts_with('-');
  const size_t start = digits.find_first_not_of("-0");
  if (start == std::string_view::npos) return "0";
  return (negative ? "-" : "") + std::string(digits.substr(start));
}

}  // namespace

// Receives the events of the JSON library's parser, which keep the order of keys and the digits of
// integers beyond 64 bits (they come as floats with their text).
struct JsonBuilder {
  explicit JsonBuilder(int max_depth) : max_depth(max_depth) {}

  bool null() { return add({}); }
  bool boolean(bool value) { return add(JsonValue::boolean(value)); }
  bool number_integer(int64_t value) { return add(JsonValue::integer(value)); }
  bool number_unsigned(uint64_t value) { return add(JsonValue::integer(std::to_string(value))); }
  bool number_float(double value, const std::string& text) {
    const bool is_integer = text.find_first_of(".eE") == std::string::npos;
    return add(is_integer ? JsonValue::integer(text) : JsonValue::number(value));
  }
  bool string(std::string& value) { return add(JsonValue::string(std::move(value))); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(size_t) { return open(JsonValue::object()); }
  bool start_array(size_t) { return open(JsonValue::array()); }
  bool key(std::string& value) {
    stack.back()->keys_.push_back(std::move(value));
    return true;
  }
  bool end_object() {
    keep_last_of_equal_keys(*stack.back());
    stack.pop_back();
    return true;
  }
  bool end_array() {
    stack.pop_back();
    return true;
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& exception) {
    const std::string_view what =
        exception.what();  // "[json.exception.x.101] parse error at line 1, ...: y"
    const size_t colon = what.find(": ");
    error =
        fmt::format("at byte {}: {}", position, colon == what.npos ? what : what.substr(colon + 2));
    return false;
  }

  JsonValue* place(JsonValue value) {
    if (stack.empty()) {
      root = std::move(value);
      return &root;
    }
    auto& items = stack.back()->items_;
    items.push_back(std::move(value));
    return &items.back();
  }
  bool add(JsonValue value) {
    place(std::move(value));
    return true;
  }
  bool open(JsonValue container) {
    if (static_cast<int>(stack.size()) >= max_depth) {
      error = fmt::format("nested more than {} deep", max_depth);
      return false;
    }
    stack.push_back(
        place(std::move(container)));  // stays valid: a parent grows only after its child is closed
    return true;
  }

  static void keep_last_of_equal_keys(JsonValue& object) {
    std::unordered_map<std::string_view, size_t> first;
    auto& keys = object.keys_;
    auto& items = object.items_;
    if (keys.size() < 2) return;
    first.reserve(keys.size());
    std::vector<bool> drop(keys.size());
    size_t num_dropped = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto [at, is_new] = first.try_emplace(keys[i], i);
      if (is_new) continue;
      items[at->second] = std::move(items[i]);
      drop[i] = true;
      ++num_dropped;
    }
    if (num_dropped == 0) return;
    size_t kept = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (drop[i]) continue;
      if (kept != i) {
        keys[kept] = std::move(keys[i]);
        items[kept] = std::move(items[i]);
      }
      ++kept;
    }
    keys.resize(kept);
    items.resize(kept);
  }

  int max_depth;
  JsonValue root;
  std::vector<JsonValue*> stack;
  std::string error;
};

JsonValue JsonValue::boolean(bool value) {
  JsonValue v;
  v.kind_ = Kind::kBool;
  v.boolean_ = value;
  return v;
}
JsonValue JsonValue::integer(std::string digits) {
  JsonValue v;
  v.kind_ = Kind::kInteger;
  v.text_ = canonical_integer(digits);
  return v;
}
JsonValue JsonValue::integer(int64_t value) {
  return integer(std::to_string(value));
}
JsonValue JsonValue::number(double value) {
  JsonValue v;
  v.kind_ = Kind::kFloat;
  v.text_ = python_float(value);
  return v;
}
JsonValue JsonValue::string(std::string value) {
  JsonValue v;
  v.kind_ = Kind::kString;
  v.text_ = std::move(value);
  return v;
}
JsonValue JsonValue::array(std::vector<JsonValue> items) {
  JsonValue v;
  v.kind_ = Kind::kArray;
  v.items_ = std::move(items);
  return v;
}
JsonValue JsonValue::object() {
  JsonValue v;
  v.kind_ = Kind::kObject;
  return v;
}

namespace {

bool parse_with(JsonBuilder& builder, std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) {  // the library would skip it
    builder.error = "at byte 0: a byte order mark";
    return false;
  }
  return nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
}

}  // namespace

JsonValue JsonValue::parse(std::string_view text, std::string_view name, int max_depth) {
  JsonBuilder builder(max_depth);
  const bool ok = parse_with(builder, text);
  M3_CHECK(ok, "{}: not valid JSON {}", name, builder.error);
  return std::move(builder.root);
}

std::optional<JsonValue> JsonValue::try_parse(std::string_view text, int max_depth) {
  JsonBuilder builder(max_depth);
  if (!parse_with(builder, text)) return std::nullopt;
  return std::move(builder.root);
}

const char* JsonValue::kind_name() const {
  static const char* const kNames[] = {"null",   "bool",  "integer", "float",
                                       "string", "array", "object"};
  return kNames[static_cast<int>(kind_)];
}

double JsonValue::as_double() const {
  double value = 0;
  std::from_chars(text_.data(), text_.data() + text_.size(), value);
  return value;
}

const JsonValue* JsonValue::find(std::string_view key) const {
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == key) return &items_[i];
  }
  return nullptr;
}

JsonValue& JsonValue::set(std::string_view key, JsonValue value) {
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == key) return items_[i] = std::move(value);
  }
  keys_.emplace_back(key);
  items_.push_back(std::move(value));
  return items_.back();
}

void JsonValue::append_member(std::string key, JsonValue value) {
  keys_.push_back(std::move(key));
  items_.push_back(std::move(value));
}

void json_escape(std::string_view text, std::string& out) {
  for (char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<int>(c));
        } else {
          out += c;
        }
    }
  }
}

namespace {

struct Separators {
  std::string_view item, key;
};

void write_json(const JsonValue& value, const Separators& separators, std::string& out) {
  switch (value.kind()) {
    case JsonValue::Kind::kNull:
      out += "null";
      return;
    case JsonValue::Kind::kBool:
      out += value.as_bool() ? "true" : "false";
      return;
    case JsonValue::Kind::kInteger:
    case JsonValue::Kind::kFloat:
      out += value.text();
      return;
    case JsonValue::Kind::kString:
      out += '"';
      json_escape(value.text(), out);
      out += '"';
      return;
    case JsonValue::Kind::kArray:
    case JsonValue::Kind::kObject:
      break;
  }
  out += value.is_object() ? '{' : '[';
  for (size_t i = 0; i < value.size(); ++i) {
    if (i > 0) out += separators.item;
    if (value.is_object()) {
      out += '"';
      json_escape(value.keys()[i], out);
      out += '"';
      out += separators.key;
    }
    write_json(value.items()[i], separators, out);
  }
  out += value.is_object() ? '}' : ']';
}

}  // namespace

std::string JsonValue::dump() const {
  std::string out;
  write_json(*this, {",", ":"}, out);
  return out;
}

std::string JsonValue::dump_python() const {
  std::string out;
  write_json(*this, {", ", ": "}, out);
  return out;
}

}  // namespace m3
