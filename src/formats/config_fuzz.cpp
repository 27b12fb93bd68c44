// Any text as config.json and as generation_config.json: refused with an Error, or a table of tensors of bounded size
// whose shapes can be summed.
#include <cstdlib>

#include "formats/tensor_table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    m3::parse_generation_config(text, "fuzz");
  } catch (const m3::Error&) {
  }
  try {
    const m3::ModelConfig config = m3::parse_model_config(text, "fuzz");
    const auto table = m3::tensor_table(config);
    if (table.size() > 300'000 || m3::total_bytes(table) <= 0) std::abort();
    m3::count_parameters(config, table);
    if (config.text.cache_bytes_per_token() <= 0) std::abort();
  } catch (const m3::Error&) {
  }
  return 0;
}
