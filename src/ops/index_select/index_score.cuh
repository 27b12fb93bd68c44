// bf16 index scores: one instruction sequence for the scan (index_scan_bf16.cuh) and for candidates
// that are scored again (index_decode8_sm90.cu, attend_decode_sm90.cu), so that both give the same
// bits.
#pragma once
#include <cmath>

#include "hopper/matrix.cuh"

namespace m3::index_scan {

// Scores of 16 keys (rows quad and quad + 8 of the fragments a, b) for the columns of one tile.
// Lane t of a quad holds the 16-byte chunks t, t + 4, t + 8, t + 12 of its row, of key and query
// alike.
__device__ __forceinline__ void bf16_scores(const uint4 (&a)[4], const uint4 (&b)[4],
                                            const uint32_t (&query)[4][4], float (&sum)[4]) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    hopper::mma_m16n8k16_bf16(sum, {a[i].x, b[i].x, a[i].y, b[i].y}, {query[i][0], query[i][1]});
    hopper::mma_m16n8k16_bf16(sum, {a[i].z, b[i].z, a[i].w, b[i].w}, {query[i][2], query[i][3]});
  }
}

// One index query row (128 bf16) as column 0 of a tile whose other columns are 0.
__device__ __forceinline__ void load_query_row(const uint4* row, uint32_t (&query)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 chunk = lane < 4 ? row[4 * i + lane] : uint4{0, 0, 0, 0};
    query[i][0] = chunk.x, query[i][1] = chunk.y, query[i][2] = chunk.z, query[i][3] = chunk.w;
  }
}

// Largest score of 16 keys (rows of 128 bf16) for that row, in lane 0: NaN counts as -inf, -0 as
// +0.
__device__ __forceinline__ float best_of_16_keys(const uint4* keys, const uint32_t (&query)[4][4]) {
  const int lane = threadIdx.x % 32;
  const uint4* row = keys + lane / 4 * 16 + lane % 4;
  uint4 a[4], b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = row[4 * i], b[i] = row[8 * 16 + 4 * i];
  float sum[4];
  bf16_scores(a, b, query, sum);
  float best = fmaxf(fmaxf(-INFINITY, sum[0]), sum[2]);  // column 0 lies in the lanes t = 0
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, step));
  return best + 0.0f;
}

}  // namespace m3::index_scan
