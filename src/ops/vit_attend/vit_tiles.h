// How forward and backward cut the work: items of one segment, one head and a block of rows, taken by workers that
// each own a piece of scratch.
#pragma once
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace m3 {

// Rows of one side that share a packed tile of kVitKeys rows of the other side. Packing costs about as much as 30
// rows' products, so blocks are as tall as an L2 of 512 KB allows with everything else (head dim 80).
inline constexpr int64_t kVitRows = 384, kVitBackwardRows = 192;
inline constexpr int64_t kVitKeys = 64;

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

struct VitItem {
  int64_t begin, end;  // the segment's tokens
  int64_t head;
  int64_t row, row_end;  // the block
  int64_t rows() const { return row_end - row; }
};

// Checks cu_segments (ascending from 0 to num_tokens) and lists the items.
std::vector<VitItem> vit_items(std::span<const int32_t> cu_segments, int64_t num_tokens, int64_t num_heads,
                               int64_t block_rows);

// One row of one head as f32, times factor.
void vit_row(const Tensor& x_THD, int64_t token, int64_t head, float factor, float* out_D);

}  // namespace m3
