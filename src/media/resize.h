// Target sizes and the bicubic resize of the image and video processors (model.md §12, §13).
#pragma once
#include <cstdint>

#include "media/image.h"

namespace m3 {

struct PixelBounds {
  int64_t min_pixels, max_pixels;
};
inline constexpr PixelBounds kImageBounds{3136, 451584};  // 4 to 576 tokens
inline constexpr PixelBounds kVideoBounds{3136, 602112};  // per frame

inline constexpr int kResizeFactor = 28;  // patch 14 x merge 2: both sides become multiples of it
inline constexpr int kMaxSideRatio = 200;

struct ImageSize {
  int height, width;
  bool operator==(const ImageSize&) const = default;
};

// The size a picture of height x width is resized to. IEEE double in the order of model.md §12.
// Throws for a side below 1, a side ratio above 200, and bounds so small that a side becomes 0.
ImageSize smart_resize(int64_t height, int64_t width, PixelBounds bounds);

// Antialiased bicubic (a = -0.5), bit for bit Image.resize of Pillow 9.4 to 12.3: width first, stored
// as bytes, then height; weights in 22-bit fixed point; a pass that keeps the size is skipped.
Image resize_bicubic(const Image& image, ImageSize size);

}  // namespace m3
