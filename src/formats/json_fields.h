// Strict reading of JSON objects: every field is taken by name with its type and bounds, every complaint
// names the file and the field, and what nobody took can be listed. For .cpp files of this folder.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace m3 {

constexpr uint64_t kMaxJsonBytes = 16 << 20;  // config files take kilobytes, the index of M3 in MXFP8 six megabytes

// Throws naming `file` for text that is not JSON, repeats a key within an object, nests deeper than 32 or
// exceeds kMaxJsonBytes.
nlohmann::json parse_json(std::string_view text, const std::string& file);

// One object. A field that is null counts as absent.
class JsonFields {
 public:
  // `path` is the place in the file, for messages: "text_config".
  JsonFields(const nlohmann::json& object, std::string file, std::string path = "");

  bool has(const char* key) const { return find(key) != nullptr; }

  std::optional<int64_t> integer(const char* key, int64_t low, int64_t high);
  std::optional<double> number(const char* key, double low, double high);
  std::optional<bool> boolean(const char* key);
  std::optional<std::string> text(const char* key);
  std::optional<std::vector<std::string>> texts(const char* key, size_t count = 0);  // 0: any number
  std::optional<std::vector<int64_t>> integers(const char* key, int64_t low, int64_t high, size_t count = 0);
  std::optional<JsonFields> object(const char* key);
  std::vector<JsonFields> objects(const char* key);  // a list of objects; empty if absent

  int64_t need_integer(const char* key, int64_t low, int64_t high) { return need(key, integer(key, low, high)); }
  double need_number(const char* key, double low, double high) { return need(key, number(key, low, high)); }
  template <typename T>
  T need(const char* key, std::optional<T> value) const {
    if (!value) missing(key);
    return *value;
  }

  // The field, if present, must have this value; otherwise it is refused as not supported.
  void only(const char* key, bool wanted);
  void only(const char* key, double wanted);
  void only(const char* key, std::initializer_list<const char*> wanted);
  void only_absent(const char* key);
  void skip(std::initializer_list<const char*> keys);  // known, and without influence here

  [[noreturn]] void refuse(const char* key, const std::string& wanted) const;  // "... is FOUND; WANTED"
  [[noreturn]] void missing(const char* key) const;
  std::string name(const char* key) const;  // "config.json: text_config.hidden_size"

  void list_unknown(std::vector<std::string>& names) const;  // fields that nobody took
  // Throws for the first field that nobody took, and lists those that were asked for.
  void refuse_unknown() const;

 private:
  const nlohmann::json* find(const char* key) const;
  const nlohmann::json* take(const char* key);

  const nlohmann::json* object_;
  std::string file_, path_;
  std::set<std::string> taken_;
};

}  // namespace m3
