// Small dense products on fp32 tiles that lie in cache, from which the backward operators of attention build theirs.
// One thread, no allocation; one table per instruction set, chosen at run time.
//
//   C[m, n] (+)= sum_k A[m, k] B[k, n]
//
// A is read one element at a time through two strides, so A and its transpose cost the same. B is packed into panels of
// 16 columns, panel[n / 16][k][n % 16], columns beyond N zero: pack once, multiply often. C has room for N rounded up to
// 16. Each element is one chain of multiply-adds, k ascending, whatever M and N: results do not depend on the tiling.
#pragma once
#include <cstdint>

#include "tensor/dtype.h"

namespace m3 {

constexpr int64_t kTilePanel = 16;
constexpr int64_t tile_round_up(int64_t n) { return (n + kTilePanel - 1) / kTilePanel * kTilePanel; }

struct TileGemm {
  int64_t m, n, k;
  const float* a;
  int64_t a_row, a_col;    // from A[m, k] to A[m + 1, k] and to A[m, k + 1]
  const float* b_panels;
  int64_t b_panel_stride;  // from one panel to the next (>= 16 k)
  float* c;
  int64_t c_row;
  bool accumulate;
};

struct TileKernels {
  void (*gemm)(const TileGemm& problem);
  // y[i] = 2^x[i] (simd.h: exp2_lanes); x and y may be the same.
  void (*exp2)(const float* x, float* y, int64_t count);
};
const TileKernels& tile_kernels();  // of cpu_isa()

// Row i of B (k axis) from `row`, n elements of f32 or bf16, into its place in every panel.
void tile_pack_row(const void* row, DType dtype, int64_t i, int64_t n, float* panels, int64_t panel_stride);
// Column i of B (n axis) from `row`, k elements: B is the transpose of what is packed.
void tile_pack_column(const void* row, DType dtype, int64_t i, int64_t k, float* panels, int64_t panel_stride);
// n elements of f32 or bf16 widened to fp32.
void tile_widen(const void* row, DType dtype, int64_t n, float* out);

extern const TileKernels kTilePortable, kTileAvx2, kTileAvx512;

}  // namespace m3
