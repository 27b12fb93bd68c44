// Any bytes as text of the tiny tokenizer: invalid UTF-8 is refused, else the text comes back, its
// pieces cover it, and streaming gives what decoding gives. The same bytes, two by two, are ids to
// decode.
#include <cstdlib>
#include <filesystem>

#include "base/check.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

const m3::Tokenizer& tokenizer() {
  static const m3::Tokenizer tiny = m3::Tokenizer::load(
      std::filesystem::path(__FILE__).parent_path() / "../../tests/golden/tokenizer/tiny");
  return tiny;
}

void require(bool holds) {
  if (!holds) std::abort();
}

std::string stream(const std::vector<int32_t>& ids) {
  m3::StreamDecoder decoder(tokenizer());
  std::string text;
  for (int32_t id : ids) {
    const std::string piece = decoder.push(id);
    require(m3::utf8_find_invalid(piece) == piece.npos);
    text += piece;
  }
  return text + decoder.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < size; i += 2) ids.push_back((data[i] << 8 | data[i + 1]) % 1100);
  require(tokenizer().decode(ids) == stream(ids));
  try {
    ids = tokenizer().encode(text);
  } catch (const m3::Error&) {
    require(m3::utf8_find_invalid(text) != text.npos);
    return 0;
  }
  require(m3::utf8_find_invalid(text) == text.npos);
  require(tokenizer().decode(ids) == text && stream(ids) == text);
  require(tokenizer().decode(tokenizer().encode(text, {.added_tokens = false})) == text);
  std::string joined;
  for (const std::string& piece : tokenizer().split(text)) joined += piece;
  require(joined == text);
  return 0;
}
