// Pictures: bytes of a file to RGB. JPEG, PNG, WebP and the first frame of a GIF.
//
// Rules (model.md §12, tests/golden/media/README.md): the type comes from the first bytes, never from
// a name; EXIF orientation is applied; transparency is composed over white; 16-bit samples are cut to
// the high byte; CMYK JPEG as Pillow does it; no gamma, no colour profile. A picture loads only if
// every pixel comes from undamaged data; damage elsewhere (a text chunk, bytes after the end, a later
// GIF frame, bad EXIF) does no harm.
//
// Errors: m3::Error whose text names the format and what is wrong ("PNG: chunk IDAT at byte 41 is
// damaged (wrong CRC)"), without a file name; callers put the name or the place in the request in
// front. All functions are thread-safe and keep no state.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "media/limits.h"

namespace m3 {

// rgb_HW3: height x width x (red, green, blue), rows from the top, no padding.
struct Image {
  int height = 0, width = 0;
  std::vector<uint8_t> rgb_HW3;

  Image() = default;
  Image(int height, int width)
      : height(height), width(width), rgb_HW3(static_cast<size_t>(height) * width * 3) {}
  const uint8_t* row(int y) const { return rgb_HW3.data() + static_cast<size_t>(y) * width * 3; }
  uint8_t* row(int y) { return rgb_HW3.data() + static_cast<size_t>(y) * width * 3; }
};

Image decode_image(std::span<const std::byte> bytes, const MediaLimits& limits = {});

// The same for a file, with its path in front of every message.
Image load_image(const std::filesystem::path& path, const MediaLimits& limits = {});

// Lossless PNG of an RGB picture, for training data and reports.
std::vector<std::byte> encode_png(const Image& image);

// Orientation as EXIF numbers it: 1 upright, 2 mirrored left-right, 3 turned 180, 4 mirrored
// top-bottom, 5 transposed, 6 to be turned 90 clockwise, 7 transversed, 8 to be turned 90
// counter-clockwise. Returns the picture as it is to be shown; other numbers count as 1.
Image apply_orientation(Image stored, int orientation);

}  // namespace m3
