// Device code and host helpers that the Hopper prefill kernels of attend share.
#pragma once
#include <cuda_runtime.h>

#include "hopper/matrix.cuh"
#include "hopper/tensor_map.h"
#include "hopper/wgmma.cuh"
#include "ops/attend/attend_sm90.h"
#include "ops/common/msa_device.cuh"
#include "tensor/cuda_check.h"

namespace m3::attend_sm90_detail {

using namespace hopper;

constexpr int kDim = 128, kBlock = 128, kHeads = 16, kQueries = kAttendTileQueries;
constexpr int kHalfBytes = kBlock * 128, kTileBytes = 2 * kHalfBytes;  // K or V of one block
constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
constexpr int kNone = 0x7fffffff;  // no block

// Tiles of a sequence: aligned positions floor(first / 8) .. floor(last / 8).
__device__ __forceinline__ int floor_tile(int position) {
  return position >> 3;
}
__device__ __forceinline__ int num_tiles(const MsaSequence& s) {
  return s.q_len == 0
             ? 0
             : floor_tile(s.first_position + s.q_len - 1) - floor_tile(s.first_position) + 1;
}

struct TileRows {
  int32_t row0;  // query row of the tile's first position; rows outside [begin, end) are not ours
  int32_t begin, end;
  int32_t position0;  // position of row0; negative: a tile of empty rows
};

__device__ __forceinline__ TileRows tile_rows(const MsaSequence& seq, int tile) {
  TileRows t;
  t.position0 = (floor_tile(seq.first_position) + tile) * kQueries;
  t.row0 = seq.q_begin + t.position0 - seq.first_position;
  t.begin = seq.q_begin;
  t.end = seq.q_begin + seq.q_len;
  return t;
}

// S = Q K^T for 64 rows: 8 products, committed. kQueryHalf: bytes from channel 0 to channel 64 of
// Q.
template <int kQueryHalf>
__device__ __forceinline__ void issue_qk(float (&s)[64], uint64_t query, uint64_t keys) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t in_half = k % 4 * 32;
    wgmma_bf16_ss(s, descriptor_advance(query, k / 4 * kQueryHalf + in_half),
                  descriptor_advance(keys, k / 4 * kHalfBytes + in_half), k == 0 ? 0 : 1);
  }
  wgmma_commit();
}

// O (+)= P V: 8 steps of 16 keys, committed.
template <bool kAccumulate>
__device__ __forceinline__ void issue_pv(float (&o)[64], uint32_t (&weights)[8][4],
                                         uint64_t values) {
  if constexpr (kAccumulate) wgmma_pin(o);
  wgmma_pin(weights);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlock / 16; ++k) {
    wgmma_bf16_rs<1>(o, weights[k], descriptor_advance(values, k * 16 * 128),
                     kAccumulate || k > 0 ? 1 : 0);
  }
  wgmma_commit();
}

// keep = 0 makes zeros of whatever s holds, keep = ~0 changes nothing.
__device__ __forceinline__ void pack_weights(const float (&s)[64], uint32_t (&weights)[8][4],
                                             uint32_t keep = ~0u) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weights[k][i] = pack_bf16x2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]) & keep;
  }
}

// Maximum of a row's logits over the quad that shares it; row 0: lane / 4, row 1: lane / 4 + 8.
__device__ __forceinline__ float row_maximum(const float (&s)[64], int row) {
  float top = fmaxf(s[2 * row], s[2 * row + 1]);
#pragma unroll
  for (int j = 4; j < 64; j += 4) top = fmaxf(top, fmaxf(s[j + 2 * row], s[j + 2 * row + 1]));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  return fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
}

// Logits to weights relative to `top`, in place; returns the sum over this lane's columns.
__device__ __forceinline__ float exponentiate_row(float (&s)[64], int row, float top,
                                                  float scale_log2) {
  const float shift = top * scale_log2;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
    s[j + 2 * row] = exp2_approx(fmaf(s[j + 2 * row], scale_log2, -shift));
    s[j + 2 * row + 1] = exp2_approx(fmaf(s[j + 2 * row + 1], scale_log2, -shift));
    sum += s[j + 2 * row] + s[j + 2 * row + 1];
  }
  return sum;
}

// One warp's query to partial result `partial` (negative: to none): the accumulators lane by lane,
// 8 x 16 bytes each, and per row the maximum and the sum over its columns (`sum`: of this lane's).
__device__ __forceinline__ void store_partial(uint4* partial_o, float2* partial_ml, int partial,
                                              const float (&o)[64], const float (&top)[2],
                                              float (&sum)[2], int lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
    sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
  }
  if (partial < 0) return;
  uint4* to = partial_o + int64_t{partial} * 256 + lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i * 32] = make_uint4(
        pack_bf16x2(o[8 * i], o[8 * i + 1]), pack_bf16x2(o[8 * i + 2], o[8 * i + 3]),
        pack_bf16x2(o[8 * i + 4], o[8 * i + 5]), pack_bf16x2(o[8 * i + 6], o[8 * i + 7]));
  }
  if (lane % 4 < 2) {
    partial_ml[int64_t{partial} * kHeads + lane / 4 + lane % 4 * 8] =
        lane % 4 == 0 ? make_float2(top[0], sum[0]) : make_float2(top[1], sum[1]);
  }
}

// k or v as (channel, token, head, page); a packed tensor is one page.
inline CUtensorMap kv_map(const AttendCudaArgs& a, const void* data) {
  const int64_t R = a.geometry.groups, row = kDim * 2;
  if (a.batch.layout == KvLayout::kPaged) {
    return tensor_map_create(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                             {{kDim, 0, 64},
                              {kBlock, row, kBlock},
                              {R, kBlock * row, 1},
                              {a.num_pages, R * kBlock * row, 1}},
                             MapSwizzle::k128Bytes);
  }
  return tensor_map_create(
      data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      {{kDim, 0, 64}, {a.num_pages, R * row, kBlock}, {R, row, 1}, {1, a.num_pages * R * row, 1}},
      MapSwizzle::k128Bytes);
}

// q as (channel, head, token): the 16 heads of one group for `queries` consecutive tokens.
inline CUtensorMap query_map(const AttendCudaArgs& a, int queries) {
  const int64_t H = int64_t{a.geometry.groups} * kHeads;
  return tensor_map_create(
      a.q_THD, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      {{kDim, 0, 64}, {H, kDim * 2, kHeads}, {a.batch.num_queries, H * kDim * 2, queries}},
      MapSwizzle::k128Bytes);
}

// Where the K or V tile of block b lies: coordinates of kv_map.
struct KvPlace {
  int token, page;
};
__device__ __forceinline__ KvPlace kv_place(const MsaBatch& batch, const MsaSequence& seq, int b) {
  if (batch.layout == KvLayout::kPaged)
    return {0, batch.page_table[seq.index * batch.max_pages + b]};
  return {seq.k_begin + b * kBlock, 0};
}

}  // namespace m3::attend_sm90_detail
