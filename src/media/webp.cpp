// WebP through libwebp, where it was found at configure time.
#include "base/check.h"
#include "media/decoders.h"

#ifdef M3_HAVE_WEBP
#include <webp/decode.h>

#include <string_view>
#endif

namespace m3::media {

#ifndef M3_HAVE_WEBP

Decoded decode_webp(Bytes, const MediaLimits&) {
  M3_FAIL("WebP pictures are not supported by this build: it lacks libwebp (install libwebp-dev and configure with -DM3_WEBP=ON)");
}

#else

namespace {

const char* reason(VP8StatusCode status) {
  switch (status) {
    case VP8_STATUS_NOT_ENOUGH_DATA:
    case VP8_STATUS_SUSPENDED: return "the file is truncated";
    case VP8_STATUS_OUT_OF_MEMORY: return "out of memory";
    case VP8_STATUS_UNSUPPORTED_FEATURE: return "a feature is not supported (or the file is damaged)";
    default: return "the file is damaged";
  }
}

// Orientation of the EXIF chunk. Some writers put JPEG's prefix in front of it.
int orientation_of(Bytes file) {
  size_t at = 12;
  while (file.size() - at >= 8) {
    const std::string_view name(reinterpret_cast<const char*>(file.data()) + at, 4);
    const size_t length = little_endian_u32(file, at + 4);
    if (length > file.size() - at - 8) return 1;
    if (name == "EXIF") {
      Bytes data = file.subspan(at + 8, length);
      const std::string_view text(reinterpret_cast<const char*>(data.data()), data.size());
      return exif_orientation(text.starts_with(std::string_view("Exif\0\0", 6)) ? data.subspan(6) : data);
    }
    at += 8 + length + (length & 1);
    if (at > file.size()) return 1;
  }
  return 1;
}

}  // namespace

Decoded decode_webp(Bytes file, const MediaLimits& limits) {
  const auto* data = reinterpret_cast<const uint8_t*>(file.data());
  WebPDecoderConfig config;
  M3_CHECK(WebPInitDecoderConfig(&config), "WebP: libwebp has another version than its header");
  const VP8StatusCode header = WebPGetFeatures(data, file.size(), &config.input);
  M3_CHECK(header == VP8_STATUS_OK, "WebP: the header is incomplete or damaged: {}", reason(header));
  check_size("WebP", config.input.height, config.input.width, limits);
  M3_CHECK(!config.input.has_animation, "WebP: an animation is not supported: give a still picture or a video");

  Decoded out{Image(config.input.height, config.input.width), orientation_of(file)};
  const size_t num_pixels = static_cast<size_t>(out.image.height) * out.image.width;
  const int channels = config.input.has_alpha ? 4 : 3;
  std::vector<uint8_t> rgba(config.input.has_alpha ? num_pixels * 4 : 0);
  config.output.colorspace = config.input.has_alpha ? MODE_RGBA : MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = config.input.has_alpha ? rgba.data() : out.image.rgb_HW3.data();
  config.output.u.RGBA.stride = out.image.width * channels;
  config.output.u.RGBA.size = num_pixels * channels;
  const VP8StatusCode status = WebPDecode(data, file.size(), &config);
  WebPFreeDecBuffer(&config.output);
  M3_CHECK(status == VP8_STATUS_OK, "WebP: {}", reason(status));

  for (size_t i = 0; i < rgba.size() / 4; ++i) {
    for (int c = 0; c < 3; ++c) out.image.rgb_HW3[3 * i + c] = over_white(rgba[4 * i + c], rgba[4 * i + 3]);
  }
  return out;
}

#endif

}  // namespace m3::media
