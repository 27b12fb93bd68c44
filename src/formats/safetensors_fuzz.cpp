// Any bytes as a safetensors file: refused with an Error, or every tensor can be read to its end.
#include <cstdlib>

#include "formats/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes = std::as_bytes(std::span(data, size));
  try {
    const m3::SafetensorsHeader header = m3::parse_safetensors_header(bytes, "fuzz");
    uint64_t covered = 0;
    for (const m3::SafetensorsEntry& entry : header.entries) {
      if (entry.end > size - header.data_begin) std::abort();
      if (entry.end - entry.begin != static_cast<uint64_t>(entry.shape.numel() * m3::dtype_bytes(entry.dtype))) std::abort();
      covered += entry.end - entry.begin;
    }
    if (covered != size - header.data_begin) std::abort();
  } catch (const m3::Error&) {
  }
  return 0;
}
