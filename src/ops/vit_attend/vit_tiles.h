// How forward and backward cut the work: items of one segment, one head and a block of rows, taken by workers that
// each own a piece of scratch.
#pragma once
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace m3 {

inline constexpr int64_t kVitRows = 192;  // rows that share one packed tile of the other side
inline constexpr int64_t kVitKeys = 128;  // scores of a tile: 96 KB, with the rest within an L2 of 512 KB

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

struct VitItem {
  int64_t begin, end;  // the segment's tokens
  int64_t head;
  int64_t row;  // first token of the block
  int64_t rows() const { return end - row < kVitRows ? end - row : kVitRows; }
};

// Checks cu_segments (ascending from 0 to num_tokens) and lists the items.
std::vector<VitItem> vit_items(std::span<const int32_t> cu_segments, int64_t num_tokens, int64_t num_heads);

// One row of one head as f32, times factor.
void vit_row(const Tensor& x_THD, int64_t token, int64_t head, float factor, float* out_D);

}  // namespace m3
