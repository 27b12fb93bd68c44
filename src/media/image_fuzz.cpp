// All picture formats by their first bytes: any input is refused with m3::Error or gives a whole picture.
// Seeds: tests/golden/media/{resize,broken}.
#include <cstdlib>

#include "base/check.h"
#include "media/preprocess.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const m3::MediaLimits limits{.max_pixels = 1 << 20};
  try {
    const m3::Image image = m3::decode_image({reinterpret_cast<const std::byte*>(data), size}, limits);
    const bool whole = image.height > 0 && image.width > 0 && int64_t{image.height} * image.width <= limits.max_pixels &&
                       image.rgb_HW3.size() == size_t{3} * image.height * image.width;
    if (!whole) std::abort();
    m3::preprocess_image(image, {784, 3136});
  } catch (const m3::Error&) {
  }
  return 0;
}
