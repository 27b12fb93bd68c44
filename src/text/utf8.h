// UTF-8: validation and the reading of damaged text (WHATWG: maximal subparts).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace m3 {

enum class Utf8Kind {
  kValid,       // a whole character
  kIncomplete,  // the text ends inside a character that is good so far
  kInvalid,     // `length` bytes that can never become a character: one U+FFFD
};
struct Utf8Step {
  Utf8Kind kind;
  size_t length;  // bytes, at least 1
};

// Looks at the start of a text that is not empty.
Utf8Step utf8_step(std::string_view text);

// Offset of the first byte that is not part of valid UTF-8; npos if the text is valid.
size_t utf8_find_invalid(std::string_view text);

// The first character of a valid text that is not empty, and a character's UTF-8.
uint32_t read_utf8(std::string_view text);
void append_utf8(uint32_t character, std::string& out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace m3
