// Any text as tokenizer.json: refused with an Error, or a tokenizer that encodes and decodes.
#include "base/check.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto tokenizer = m3::Tokenizer::from_json(
        std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    for (const char* text :
         {"", "hello world's  12345\n\n<s>[e~[", "  <s> \u4e2d\u0301\u180e\U0001F600\r\n",
          "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}) {
      tokenizer.decode(tokenizer.encode(text), true);
    }
  } catch (const m3::Error&) {
  }
  return 0;
}
