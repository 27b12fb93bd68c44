// A JSON value that keeps what the chat protocol needs and most libraries lose: the order of keys
// and the difference between 5 and 5.0, with all digits of integers of any length. Numbers are
// stored as Python prints them (1e5 is "100000.0"), because that is how they enter a prompt
// (model.md §15.2).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace m3 {

class JsonValue {
 public:
  enum class Kind { kNull, kBool, kInteger, kFloat, kString, kArray, kObject };

  JsonValue() = default;  // null
  static JsonValue boolean(bool value);
  static JsonValue integer(std::string digits);  // canonical: no leading zeros, "-0" is "0"
  static JsonValue integer(int64_t value);
  static JsonValue number(double value);  // finite
  static JsonValue string(std::string value);
  static JsonValue array(std::vector<JsonValue> items = {});
  static JsonValue object();

  // Strict RFC 8259 and UTF-8, nested at most max_depth deep, numbers in the range of a double; of
  // equal keys the last value stays, in the first one's place (Python). Throws Error that starts
  // with `name`, says "JSON" and the byte offset.
  static JsonValue parse(std::string_view text, std::string_view name, int max_depth = 512);
  static std::optional<JsonValue> try_parse(std::string_view text, int max_depth = 512);

  Kind kind() const { return kind_; }
  const char* kind_name() const;  // "object"
  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_bool() const { return kind_ == Kind::kBool; }
  bool is_integer() const { return kind_ == Kind::kInteger; }
  bool is_number() const { return kind_ == Kind::kInteger || kind_ == Kind::kFloat; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_array() const { return kind_ == Kind::kArray; }
  bool is_object() const { return kind_ == Kind::kObject; }

  bool as_bool() const { return boolean_; }
  const std::string& text() const { return text_; }  // of a string, or the digits of a number
  double as_double() const;                          // of a number
  // Elements of an array; values of an object, in the order of keys().
  const std::vector<JsonValue>& items() const { return items_; }
  const std::vector<std::string>& keys() const { return keys_; }
  size_t size() const { return items_.size(); }

  const JsonValue* find(std::string_view key) const;  // null pointer if absent or no object
  JsonValue& set(std::string_view key, JsonValue value);
  void append_member(std::string key, JsonValue value);  // the key must be new
  JsonValue& item(size_t index) { return items_[index]; }
  void push_back(JsonValue value) { items_.push_back(std::move(value)); }

  // Same kinds, keys in the same order, same numbers as Python prints them.
  bool operator==(const JsonValue& other) const = default;

  std::string dump() const;         // compact: {"a":[1,2.0]}
  std::string dump_python() const;  // json.dumps(value, ensure_ascii=False): {"a": [1, 2.0]}

 private:
  friend struct JsonBuilder;
  Kind kind_ = Kind::kNull;
  bool boolean_ = false;
  std::string text_;
  std::vector<JsonValue> items_;
  std::vector<std::string> keys_;
};

// Appends `text` escaped for the inside of a JSON string, as Python does with ensure_ascii=False.
void json_escape(std::string_view text, std::string& out);

}  // namespace m3
