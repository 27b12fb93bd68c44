#include "train/synthetic/draw.h"

#include <algorithm>
#include <cmath>

namespace m3::synthetic {
namespace {

float star_distance(float x, float y) {
  // Five points, outer radius 1, inner .42: by symmetry one edge of one half point, upwards.
  constexpr float kSector = 6.2831853f / 5;
  const float angle = std::atan2(x, -y);  // 0 is up
  const float folded = std::abs(angle - kSector * std::round(angle / kSector));
  const float rho = std::sqrt(x * x + y * y);
  const float px = rho * std::sin(folded), py = rho * std::cos(folded);
  // From the tip (0, 1) to the notch at half a sector.
  constexpr float kInner = .42f;
  const float nx = kInner * std::sin(kSector / 2), ny = kInner * std::cos(kSector / 2);
  const float ex = nx, ey = ny - 1;
  return ((px - 0) * -ey + (py - 1) * ex) / std::sqrt(ex * ex + ey * ey);
}

// Distance to a horizontal or vertical stroke from (x0, y0) to (x1, y1) with round ends.
float stroke_distance(float x, float y, float x0, float y0, float x1, float y1) {
  const float dx = x1 - x0, dy = y1 - y0;
  const float t = std::clamp(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0.0f, 1.0f);
  return std::hypot(x - x0 - t * dx, y - y0 - t * dy);
}

// Approximately normal numbers: sums of four random bytes, mean 510, variance 4 (256^2 - 1) / 12. Integers, so
// that a picture is the same on every machine; four of them cost one Philox block.
class FastNormal {
 public:
  FastNormal(uint64_t seed, uint64_t stream) : random_(seed, stream) {}
  float next() {
    if (at_ == 4) {
      words_ = random_.block(block_++);
      at_ = 0;
    }
    const uint32_t w = words_[at_++];
    const int sum = static_cast<int>((w & 255) + (w >> 8 & 255) + (w >> 16 & 255) + (w >> 24));
    constexpr float kInverseDeviation = 1.0f / 147.8f;
    return static_cast<float>(sum - 510) * kInverseDeviation;
  }

 private:
  Philox random_;
  std::array<uint32_t, 4> words_ = {};
  uint64_t block_ = 0;
  int at_ = 4;
};

void composite(std::vector<float>& rgb, int size, const Sprite& sprite) {
  const float reach = sprite.radius * (sprite.is_digit ? 1.3f : 1.5f) + 2;
  const int x0 = std::max(0, static_cast<int>(sprite.x - reach)), x1 = std::min(size, static_cast<int>(sprite.x + reach) + 1);
  const int y0 = std::max(0, static_cast<int>(sprite.y - reach)), y1 = std::min(size, static_cast<int>(sprite.y + reach) + 1);
  const float c = std::cos(sprite.rotation), s = std::sin(sprite.rotation);
  for (int j = y0; j < y1; ++j) {
    for (int i = x0; i < x1; ++i) {
      const float dx = (i + .5f - sprite.x) / sprite.radius, dy = (j + .5f - sprite.y) / sprite.radius;
      const float u = c * dx + s * dy, v = c * dy - s * dx;
      const float distance = sprite.is_digit ? digit_distance(sprite.digit, u, v) : shape_distance(sprite.shape, u, v);
      const float cover = std::clamp(.5f - distance * sprite.radius, 0.0f, 1.0f);
      if (cover <= 0) continue;
      float* p = rgb.data() + 3 * (static_cast<size_t>(j) * size + i);
      p[0] += cover * (sprite.colour.r - p[0]);
      p[1] += cover * (sprite.colour.g - p[1]);
      p[2] += cover * (sprite.colour.b - p[2]);
    }
  }
}

float uniform(Philox& random, float low, float high) { return low + (high - low) * static_cast<float>(random.uniform()); }

}  // namespace

float shape_distance(Shape shape, float x, float y) {
  const float a = std::abs(x), b = std::abs(y), rho = std::sqrt(x * x + y * y);
  switch (shape) {
    case kCircle: return rho - .85f;
    case kSquare: return std::max(a, b) - .72f;
    case kTriangle: return std::max({-.5f * y + .866f * x, -.5f * y - .866f * x, y}) - .5f;  // tip up
    case kRing: return std::abs(rho - .7f) - .2f;
    case kCross: return std::min(std::max(a - .26f, b - .92f), std::max(a - .92f, b - .26f));
    case kStar: return star_distance(x, y);
    case kMoon: return std::max(rho - .9f, .72f - std::sqrt((x - .42f) * (x - .42f) + y * y));
    case kBar: return std::max(a - .95f, b - .3f);
    default: return 1;
  }
}

float digit_distance(int digit, float x, float y) {
  // Segments top, top right, bottom right, bottom, bottom left, top left, middle.
  static constexpr float kSegments[7][4] = {{-.5f, -.9f, .5f, -.9f}, {.5f, -.9f, .5f, 0}, {.5f, 0, .5f, .9f}, {-.5f, .9f, .5f, .9f},
                                            {-.5f, 0, -.5f, .9f},   {-.5f, -.9f, -.5f, 0}, {-.5f, 0, .5f, 0}};
  static constexpr unsigned kLit[10] = {0x3f, 0x06, 0x5b, 0x4f, 0x66, 0x6d, 0x7d, 0x07, 0x7f, 0x6f};
  constexpr float kHalfWidth = .17f;
  float nearest = 9;
  for (int i = 0; i < 7; ++i) {
    if (kLit[digit] >> i & 1) {
      const float* s = kSegments[i];
      nearest = std::min(nearest, stroke_distance(x, y, s[0], s[1], s[2], s[3]));
    }
  }
  return nearest - kHalfWidth;
}

Background Background::random(Philox& random) {
  Background out;
  const float grey = uniform(random, .3f, .7f);
  out.base = {grey + .03f * static_cast<float>(random.normal()), grey + .03f * static_cast<float>(random.normal()),
              grey + .03f * static_cast<float>(random.normal())};
  const float amplitude = uniform(random, 0, .15f), direction = uniform(random, 0, 6.2831853f);
  out.slope_x = amplitude * std::cos(direction);
  out.slope_y = amplitude * std::sin(direction);
  out.noise = uniform(random, 0, .03f);
  out.noise_seed = random.next_u64();
  return out;
}

Rgb vary_colour(Colour colour, Philox& random) {
  const Rgb c = kColourValues[colour];
  return {c.r + .03f * static_cast<float>(random.normal()), c.g + .03f * static_cast<float>(random.normal()),
          c.b + .03f * static_cast<float>(random.normal())};
}

Image render(int size, const Background& background, const std::vector<Sprite>& sprites, int frame) {
  std::vector<float> rgb(static_cast<size_t>(size) * size * 3);
  for (int j = 0; j < size; ++j) {
    for (int i = 0; i < size; ++i) {
      const float x = (i + .5f) / size - .5f, y = (j + .5f) / size - .5f;
      const float slope = background.slope_x * x + background.slope_y * y;
      float* p = rgb.data() + 3 * (static_cast<size_t>(j) * size + i);
      p[0] = background.base.r + slope - background.tint * x;
      p[1] = background.base.g + slope;
      p[2] = background.base.b + slope - background.tint * y;
    }
  }
  for (const Sprite& sprite : sprites) composite(rgb, size, sprite);
  FastNormal normal(background.noise_seed, static_cast<uint64_t>(frame));
  Image image(size, size);
  for (size_t k = 0; k < rgb.size(); ++k) {
    const float v = std::clamp(rgb[k] + background.noise * normal.next(), 0.0f, 1.0f);
    image.rgb_HW3[k] = static_cast<uint8_t>(v * 255 + .5f);
  }
  return image;
}

}  // namespace m3::synthetic
