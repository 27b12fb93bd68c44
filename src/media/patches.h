// Pictures of multiples of 28 to rows of the vision tower (model.md §8.1, §8.6).
#pragma once
#include <cstdint>
#include <span>

#include "media/image.h"

namespace m3 {

inline constexpr int kPatchSize = 14, kMergeSize = 2, kTemporalPatch = 2;
inline constexpr int kPatchValues = 3 * kTemporalPatch * kPatchSize * kPatchSize;  // 1176

// t temporal steps of h x w patches; h and w are even. Each 2 x 2 block of patches is one token.
struct Grid {
  int64_t t = 0, h = 0, w = 0;
  int64_t num_rows() const { return t * h * w; }
  int64_t tokens_per_step() const { return h * w / (kMergeSize * kMergeSize); }
  int64_t num_tokens() const { return t * tokens_per_step(); }
  bool operator==(const Grid&) const = default;
};

// Grid of `num_frames` pictures of one size (sides multiples of 28): an odd count is padded.
Grid patch_grid(int64_t num_frames, int height, int width);

// rows [t*h*w, 1176] fp32: (v / 255 - mean) / std. Row order: step, block row, block column, row in
// block, column in block; in a row: channel, frame of the pair, y, x. The last of an odd number of
// frames fills both slots, so a still picture is a list of one. `rows` must have room for
// patch_grid(...).num_rows() * 1176 values and is written whole.
void write_patch_rows(std::span<const Image> frames, std::span<float> rows);

}  // namespace m3
