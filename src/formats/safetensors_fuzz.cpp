// Any bytes as a safetensors file: refused with an Error, or the tensors cover the data exactly.
// A first byte 'r' means that the rest is the file itself. Otherwise the input is HEADER NUL DATA and gets its right
// header length, which mutation alone would rarely keep.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "formats/safetensors.h"

namespace {

std::string file_from(std::string_view input) {
  if (input.starts_with('r')) return std::string(input.substr(1));
  const size_t end = std::min(input.find('\0'), input.size());
  std::string file(8, '\0');
  std::memcpy(file.data(), &end, sizeof end);
  file += input.substr(0, end);
  if (end < input.size()) file += input.substr(end + 1);
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string file = file_from({reinterpret_cast<const char*>(data), size});
  try {
    const auto header = m3::parse_safetensors_header(std::as_bytes(std::span(file.data(), file.size())), "fuzz");
    const uint64_t data_bytes = file.size() - header.data_begin;
    uint64_t covered = 0;
    for (const m3::SafetensorsEntry& entry : header.entries) {
      if (entry.begin != covered || entry.end > data_bytes) std::abort();
      if (entry.end - entry.begin != static_cast<uint64_t>(entry.shape.numel() * m3::dtype_bytes(entry.dtype))) std::abort();
      covered = entry.end;
    }
    if (covered != data_bytes) std::abort();
  } catch (const m3::Error&) {
  }
  return 0;
}
