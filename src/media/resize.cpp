#include "media/resize.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/cpu_features.h"
#include "base/threads.h"
#include "media/resize_kernels.h"

namespace m3 {
namespace media {
namespace {

// Catmull-Rom: the cubic with a = -0.5.
double cubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

// Taps and weights in the order of operations of tests/golden/media/README.md.
ResizeAxis make_axis(int in, int out) {
  const double scale = static_cast<double>(in) / out;
  const double filter_scale = std::max(scale, 1.0);
  const double support = 2.0 * filter_scale, inverse = 1.0 / filter_scale;
  ResizeAxis axis;
  axis.out = out;
  axis.max_taps = static_cast<int>(std::ceil(support)) * 2 + 1;
  axis.first.resize(out);
  axis.count.resize(out);
  axis.weights.resize(static_cast<size_t>(out) * axis.max_taps);
  std::vector<double> taps(axis.max_taps);
  for (int i = 0; i < out; ++i) {
    const double centre = (i + 0.5) * scale;
    const int first = std::max(static_cast<int>(centre - support + 0.5), 0);
    const int count = std::min(static_cast<int>(centre + support + 0.5), in) - first;
    double total = 0;
    for (int k = 0; k < count; ++k) {
      taps[k] = cubic((first + k - centre + 0.5) * inverse);
      total += taps[k];
    }
    axis.first[i] = first;
    axis.count[i] = count;
    for (int k = 0; k < count; ++k) {
      const double v = taps[k] / total;  // total > 0: the taps lie around the centre
      axis.weights[static_cast<size_t>(i) * axis.max_taps + k] =
          static_cast<int32_t>(v * (1 << kWeightBits) + (v >= 0 ? 0.5 : -0.5));
    }
  }
  return axis;
}

}  // namespace

void resize_row_ref(const ResizeAxis& axis, const uint8_t* in, int, uint8_t* out) {
  for (int i = 0; i < axis.out; ++i) {
    const int32_t* weights = axis.weights.data() + static_cast<size_t>(i) * axis.max_taps;
    const uint8_t* pixel = in + 3 * static_cast<size_t>(axis.first[i]);
    int32_t sum[3] = {};
    for (int k = 0; k < axis.count[i]; ++k, pixel += 3) {
      for (int c = 0; c < 3; ++c) sum[c] += weights[k] * pixel[c];
    }
    for (int c = 0; c < 3; ++c) out[3 * i + c] = round_to_byte(sum[c]);
  }
}

void blend_rows_ref(const int32_t* weights, int num_taps, const uint8_t* in, int64_t stride, int64_t bytes, uint8_t* out) {
  for (int64_t x = 0; x < bytes; ++x) {
    int32_t sum = 0;
    for (int k = 0; k < num_taps; ++k) sum += weights[k] * in[k * stride + x];
    out[x] = round_to_byte(sum);
  }
}

}  // namespace media

ImageSize smart_resize(int64_t height, int64_t width, PixelBounds bounds) {
  M3_CHECK(height > 0 && width > 0, "a picture of {} x {} pixels is empty: a side is zero", height, width);
  const int64_t longer = std::max(height, width), shorter = std::min(height, width);
  M3_CHECK(longer <= kMaxSideRatio * shorter, "{} x {} pixels: the aspect ratio is {:.1f}, at most {} is allowed", height,
           width, static_cast<double>(longer) / shorter, kMaxSideRatio);
  constexpr double kFactor = kResizeFactor;
  const double h = static_cast<double>(height), w = static_cast<double>(width);
  // std::nearbyint in the default mode rounds ties to even, as Python's round.
  double H = std::max(kFactor, kFactor * std::nearbyint(h / kFactor));
  double W = std::max(kFactor, kFactor * std::nearbyint(w / kFactor));
  if (H * W > static_cast<double>(bounds.max_pixels)) {
    const double beta = std::sqrt(h * w / static_cast<double>(bounds.max_pixels));
    H = kFactor * std::floor(h / beta / kFactor);
    W = kFactor * std::floor(w / beta / kFactor);
  } else if (H * W < static_cast<double>(bounds.min_pixels)) {
    const double beta = std::sqrt(static_cast<double>(bounds.min_pixels) / (h * w));
    H = kFactor * std::ceil(h * beta / kFactor);
    W = kFactor * std::ceil(w * beta / kFactor);
  }
  M3_CHECK(H >= 1 && W >= 1, "{} x {} pixels resized to at most {} pixels give a side of zero: raise max_pixels", height,
           width, bounds.max_pixels);
  return {static_cast<int>(H), static_cast<int>(W)};
}

Image resize_bicubic(const Image& image, ImageSize size) {
  M3_CHECK(image.height > 0 && image.width > 0 && size.height > 0 && size.width > 0,
           "resize of {} x {} to {} x {}: a side is zero", image.height, image.width, size.height, size.width);
  const bool fast = cpu_isa() >= CpuIsa::kAvx2;
  const auto resize_row = fast ? media::resize_row_avx2 : media::resize_row_ref;
  const auto blend_rows = fast ? media::blend_rows_avx2 : media::blend_rows_ref;

  Image wide;
  const Image* source = &image;
  if (image.width != size.width) {
    const media::ResizeAxis axis = media::make_axis(image.width, size.width);
    wide = Image(image.height, size.width);
    parallel_for(image.height, [&](int64_t begin, int64_t end) {
      for (int y = static_cast<int>(begin); y < end; ++y) resize_row(axis, image.row(y), image.width, wide.row(y));
    });
    source = &wide;
  }
  if (source->height == size.height) return *source;

  const media::ResizeAxis axis = media::make_axis(source->height, size.height);
  Image out(size.height, size.width);
  const int64_t row_bytes = 3 * static_cast<int64_t>(size.width);
  parallel_for(size.height, [&](int64_t begin, int64_t end) {
    for (int y = static_cast<int>(begin); y < end; ++y) {
      const int32_t* weights = axis.weights.data() + static_cast<size_t>(y) * axis.max_taps;
      blend_rows(weights, axis.count[y], source->row(axis.first[y]), row_bytes, row_bytes, out.row(y));
    }
  });
  return out;
}

}  // namespace m3
