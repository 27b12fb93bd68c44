// Reads the members of one JSON object of a request, with checks of type and range. Every complaint
// is an ApiError 400 that names the field by its path. What nobody asked for is reported at the
// end: nothing is silently ignored (serving.md §3.2).
#pragma once
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/api_error.h"
#include "text/json_value.h"

namespace m3 {

[[noreturn]] void refuse_field(const std::string& path, const std::string& message);

class FieldReader {
 public:
  // `path` is "" for the body. The object must outlive the reader.
  FieldReader(const JsonValue& object, std::string path);

  std::string path(std::string_view key) const;
  // Null and absent are the same; a null pointer or an empty optional.
  const JsonValue* take(std::string_view key);
  std::optional<std::string> text(std::string_view key);
  std::optional<bool> boolean(std::string_view key);
  std::optional<int64_t> integer(std::string_view key, int64_t least, int64_t most);
  std::optional<double> number(std::string_view key, double least, double most);
  const JsonValue* array(std::string_view key);
  const JsonValue* object(std::string_view key);
  // One of the words; empty if absent.
  std::optional<std::string> word(std::string_view key,
                                  std::initializer_list<std::string_view> words);
  std::string required_text(std::string_view key);

  // Fields that have no effect here, by design.
  void accept(std::initializer_list<std::string_view> keys);
  // A known field that is not built: only its neutral value may come (false, 0, an empty list or
  // object, or `neutral`).
  void not_built(std::string_view key, std::string_view neutral = {});

  std::vector<std::string> unknown() const;  // paths of members that nobody took
  void refuse_unknown() const;

 private:
  const JsonValue& object_;
  std::string path_;
  std::set<std::string, std::less<>> taken_;
};

}  // namespace m3
