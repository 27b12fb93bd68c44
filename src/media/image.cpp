#include "media/image.h"

#include <algorithm>

#include "base/check.h"
#include "base/file.h"
#include "media/decoders.h"
#include "media/sniff.h"

namespace m3 {
namespace media {

void check_size(const char* format, int64_t height, int64_t width, const MediaLimits& limits) {
  M3_CHECK(height > 0 && width > 0, "{}: the size is {} x {} (height x width): a side is zero", format, height, width);
  M3_CHECK(height <= limits.max_pixels / width,
           "{}: {} x {} pixels (height x width) is too large: the limit is {} pixels in all", format, height, width,
           limits.max_pixels);
}

}  // namespace media

Image decode_image(std::span<const std::byte> bytes, const MediaLimits& limits) {
  M3_CHECK(static_cast<int64_t>(bytes.size()) <= limits.max_file_bytes,
           "the picture file has {} bytes: too large, the limit is {}", bytes.size(), limits.max_file_bytes);
  const MediaKind kind = sniff_media(bytes);
  media::Decoded decoded;
  switch (kind) {
    case MediaKind::kJpeg: decoded = media::decode_jpeg(bytes, limits); break;
    case MediaKind::kPng: decoded = media::decode_png(bytes, limits); break;
    case MediaKind::kWebp: decoded = media::decode_webp(bytes, limits); break;
    case MediaKind::kGif: decoded = media::decode_gif(bytes, limits); break;
    case MediaKind::kEmpty: M3_FAIL("the picture file is empty (0 bytes)");
    case MediaKind::kUnknown:
      M3_FAIL("not an image: unknown format (wanted JPEG, PNG, WebP or GIF; the content counts, not the name)");
    default:
      M3_CHECK(!is_film(kind), "this is a video ({}), not a picture: give it as a video", media_kind_name(kind));
      M3_FAIL("{} pictures are not supported: convert it to JPEG, PNG, WebP or GIF", media_kind_name(kind));
  }
  return apply_orientation(std::move(decoded.image), decoded.orientation);
}

Image load_image(const std::filesystem::path& path, const MediaLimits& limits) {
  const MappedFile file(path);
  try {
    return decode_image(file.bytes(), limits);
  } catch (const Error& error) {
    M3_FAIL("{}: {}", path.string(), error.what());
  }
}

Image apply_orientation(Image stored, int orientation) {
  if (orientation <= 1 || orientation > 8) return stored;
  const bool transposed = orientation >= 5;
  const int height = transposed ? stored.width : stored.height;
  const int width = transposed ? stored.height : stored.width;
  // The stored pixel shown at (y, x): transposed or not, then each axis forwards or backwards.
  const bool flip_rows = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8;
  const bool flip_columns = orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7;
  Image shown(height, width);
  for (int y = 0; y < height; ++y) {
    uint8_t* out = shown.row(y);
    const int v = flip_rows ? height - 1 - y : y;
    for (int x = 0; x < width; ++x, out += 3) {
      const int u = flip_columns ? width - 1 - x : x;
      const uint8_t* in = transposed ? stored.row(u) + 3 * v : stored.row(v) + 3 * u;
      std::copy_n(in, 3, out);
    }
  }
  return shown;
}

}  // namespace m3
