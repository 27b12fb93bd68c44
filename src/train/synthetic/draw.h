// Renders shapes and digits (nano.md §3): signed distances, coverage from distance, composited in order.
#pragma once
#include <vector>

#include "base/rng.h"
#include "media/image.h"
#include "train/synthetic/words.h"

namespace m3::synthetic {

inline constexpr int kCell = 28;  // pixels: one token

// Signed distance to the shape's edge in its own frame of unit radius, negative inside; y points down.
float shape_distance(Shape shape, float x, float y);
// The same for a digit of seven segments in a box of +-.5 x +-.9.
float digit_distance(int digit, float x, float y);

struct Sprite {
  bool is_digit = false;
  Shape shape = kCircle;
  int digit = 0;
  Rgb colour = {};
  float x = 0, y = 0;        // centre in pixels; pixel (i, j) has its centre at (i + .5, j + .5)
  float radius = 10;         // or size of a digit
  float rotation = 0;        // radians
};

// Grey with a linear gradient, the same for all frames of a clip, and noise that differs between them.
struct Background {
  Rgb base = {};
  float slope_x = 0, slope_y = 0;  // over the whole picture
  float tint = 0;                  // red falls by it from left to right, blue from top to bottom: each place has its hue
  float noise = 0;                 // standard deviation
  uint64_t noise_seed = 0;
  static Background random(Philox& random);
};

// Colour with its own variation: N(0, .03) per channel.
Rgb vary_colour(Colour colour, Philox& random);

Image render(int size, const Background& background, const std::vector<Sprite>& sprites, int frame = 0);

}  // namespace m3::synthetic
