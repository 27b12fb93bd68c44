// Inside of src/media: one decoder per format, and what they share. Each takes a whole file whose first
// bytes are right and returns the picture as stored, with its EXIF orientation beside it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "media/image.h"

namespace m3::media {

using Bytes = std::span<const std::byte>;

struct Decoded {
  Image image;
  int orientation = 1;
};

Decoded decode_png(Bytes file, const MediaLimits& limits);
Decoded decode_jpeg(Bytes file, const MediaLimits& limits);
Decoded decode_webp(Bytes file, const MediaLimits& limits);
Decoded decode_gif(Bytes file, const MediaLimits& limits);

// Refuses an empty size and one above the limit, before memory is taken for it.
void check_size(const char* format, int64_t height, int64_t width, const MediaLimits& limits);

// Orientation (1..8) from a TIFF structure as EXIF holds it; 1 where it is absent or damaged.
int exif_orientation(Bytes tiff);

inline uint32_t byte_at(Bytes bytes, size_t at) { return static_cast<uint32_t>(bytes[at]); }
inline uint32_t big_endian_u32(Bytes b, size_t at) {
  return byte_at(b, at) << 24 | byte_at(b, at + 1) << 16 | byte_at(b, at + 2) << 8 | byte_at(b, at + 3);
}
inline uint32_t little_endian_u32(Bytes b, size_t at) {
  return byte_at(b, at + 3) << 24 | byte_at(b, at + 2) << 16 | byte_at(b, at + 1) << 8 | byte_at(b, at);
}
inline uint32_t little_endian_u16(Bytes b, size_t at) { return byte_at(b, at + 1) << 8 | byte_at(b, at); }

// a * b / 255, rounded as Pillow does it.
inline int scale_255(int a, int b) {
  const int t = a * b + 128;
  return ((t >> 8) + t) >> 8;
}

// `colour` with coverage `alpha` over white: one rounding of the sum, as Pillow's paste.
inline uint8_t over_white(int colour, int alpha) {
  const int t = colour * alpha + 255 * (255 - alpha) + 128;
  return static_cast<uint8_t>(((t >> 8) + t) >> 8);
}

}  // namespace m3::media
