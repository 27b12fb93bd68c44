// Shared by the tests of src/media: golden files and small pictures written by hand, byte by byte.
#pragma once
#include <zlib.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "media/image.h"

namespace m3::test {

inline std::string golden(const std::string& name) { return read_file(std::string(M3_SOURCE_DIR "/tests/golden/media/") + name); }

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline Image decode(std::string_view text, const MediaLimits& limits = {}) { return decode_image(as_bytes(text), limits); }

// The message of the refusal; empty if the picture loads.
inline std::string refusal(std::string_view text, const MediaLimits& limits = {}) {
  try {
    decode(text, limits);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

inline std::string big_u32(uint32_t v) {
  return {static_cast<char>(v >> 24), static_cast<char>(v >> 16), static_cast<char>(v >> 8), static_cast<char>(v)};
}
inline std::string little_u16(uint32_t v) { return {static_cast<char>(v), static_cast<char>(v >> 8)}; }

inline std::string png_chunk(const std::string& type, const std::string& data) {
  const std::string body = type + data;
  const auto crc = crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()));
  return big_u32(static_cast<uint32_t>(data.size())) + body + big_u32(static_cast<uint32_t>(crc));
}

inline std::string deflate_bytes(const std::string& raw) {
  uLongf size = compressBound(static_cast<uLong>(raw.size()));
  std::string out(size, '\0');
  compress(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(raw.data()), static_cast<uLong>(raw.size()));
  out.resize(size);
  return out;
}

inline const std::string kPngSignature = "\x89PNG\r\n\x1a\n";

inline std::string png_header(uint32_t width, uint32_t height, int depth, int colour_type) {
  return kPngSignature + png_chunk("IHDR", big_u32(width) + big_u32(height) + static_cast<char>(depth) +
                                               static_cast<char>(colour_type) + std::string(3, '\0'));
}

// `raw`: scan lines, each with its filter byte. `between`: chunks before the pixels.
inline std::string png(uint32_t width, uint32_t height, int depth, int colour_type, const std::string& raw,
                       const std::string& between = {}) {
  return png_header(width, height, depth, colour_type) + between + png_chunk("IDAT", deflate_bytes(raw)) + png_chunk("IEND", "");
}

// GIF codes of a fixed width, least significant bit first, in one sub-block.
inline std::string gif_codes(const std::vector<uint32_t>& codes, int width) {
  std::string bytes;
  uint64_t bits = 0;
  int count = 0;
  for (uint32_t code : codes) {
    bits |= uint64_t{code} << count;
    for (count += width; count >= 8; count -= 8, bits >>= 8) bytes += static_cast<char>(bits);
  }
  if (count > 0) bytes += static_cast<char>(bits);
  return std::string(1, static_cast<char>(bytes.size())) + bytes + '\0';
}

// Screen with a palette of red, green, blue, white; `frame` is what follows.
inline std::string gif(uint32_t width, uint32_t height, const std::string& frame) {
  return std::string("GIF89a") + little_u16(width) + little_u16(height) + std::string("\x81\0\0", 3) +
         std::string("\xff\0\0\0\xff\0\0\0\xff\xff\xff\xff", 12) + frame;
}
inline std::string gif_frame(uint32_t left, uint32_t top, uint32_t width, uint32_t height, const std::string& data, int flags = 0) {
  return std::string(",") + little_u16(left) + little_u16(top) + little_u16(width) + little_u16(height) + static_cast<char>(flags) + data;
}

}  // namespace m3::test
