// Films: any input is refused with m3::Error or gives frames of one size.
// Seeds: the films of tests/golden/media/broken.
#include <cstdlib>

#include "base/check.h"
#include "media/video.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const m3::MediaLimits limits{.max_pixels = 1 << 18, .max_source_frames = 64};
  try {
    m3::VideoReader reader({reinterpret_cast<const std::byte*>(data), size}, limits);
    if (!(reader.fps() > 0)) std::abort();
    while (reader.next()) {
      const m3::Image image = reader.image();
      if (image.height != reader.height() || image.width != reader.width()) std::abort();
    }
  } catch (const m3::Error&) {
  }
  return 0;
}
