// Softmax over the blocks of a tile, and the sum of partial results (attend_tile_sm90.cu). A warp
// has the 16 rows of one query, a lane two of them, lane / 4 and lane / 4 + 8.
#pragma once
#include "ops/attend/attend_sm90.cuh"

namespace m3::attend_tile_detail {

using namespace attend_sm90_detail;

constexpr float kSlack = 8;  // log2

struct RowState {
  float maximum[2] = {
      -INFINITY, -INFINITY};  // of the raw logits, rows lane / 4 and lane / 4 + 8; see softmax_step
  float sum[2] = {0, 0};      // of this lane's columns
};

// The largest logit of both rows of a lane's quad, or something below it: where all logits of a row
// are negative, the order of their bits as integers is the reverse. That is good enough as a
// reference point, and integers have a maximum of three.
__device__ __forceinline__ void rows_maximum(const float (&s)[64], float (&best)[2]) {
  int top[2][2];
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int& t = top[row][j / 4 % 2];
      const int x = __float_as_int(s[j + 2 * row]), y = __float_as_int(s[j + 2 * row + 1]);
      t = j < 8 ? max(x, y) : max(t, max(x, y));
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int here = max(top[row][0], top[row][1]);
#pragma unroll
    for (int step = 1; step <= 2; ++step)
      here = max(here, __shfl_xor_sync(0xffffffffu, here, step));
    best[row] = __int_as_float(here);
  }
}

// Turns logits into weights in place. The reference point of the exponentials follows the true
// maximum only when a weight would pass 2^kSlack; until then nothing that was summed before has to
// be scaled. Returns true if it did; then `old` holds the factors.
// kExact: with the true maxima, for the block that comes first.
template <bool kExact>
__device__ __forceinline__ bool softmax_step(float (&s)[64], RowState& state, float (&old)[2],
                                             float scale_log2) {
  float best[2];
  if constexpr (kExact) {
#pragma unroll
    for (int row = 0; row < 2; ++row) best[row] = row_maximum(s, row);
  } else {
    rows_maximum(s, best);
  }
  const bool grows = (best[0] - state.maximum[0]) * scale_log2 > kSlack ||
                     (best[1] - state.maximum[1]) * scale_log2 > kSlack;
  int moved = __any_sync(0xffffffffu, grows);
  if (moved) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float reference = fmaxf(best[row], state.maximum[row]);
      old[row] = exp2_approx((state.maximum[row] - reference) * scale_log2);
      state.maximum[row] = reference;
      state.sum[row] *= old[row];
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row)
    state.sum[row] += exponentiate_row(s, row, state.maximum[row], scale_log2);
  asm volatile(
      ""
      : "+r"(moved));  // the compiler would else make a second copy of everything behind the branch
  return moved != 0;
}

// Weights of a query's partial results, whose maxima and sums lie at ml[slot][8 queries][16 rows];
// moves the state and O to the common maximum. Lane c of a quad has those of slots c, c + 4, ...
template <int kPerLane>
__device__ __forceinline__ void weigh_partials(float (&weight)[kPerLane][2], const float2* ml,
                                               int pairs, float (&o)[64], RowState& state,
                                               float scale_log2, int lane) {
  float old[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float2 mine[kPerLane];
    float top = state.maximum[row];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int slot = 4 * i + lane % 4;
      mine[i] = slot < pairs ? ml[slot * kQueries * kHeads + 8 * row] : make_float2(-INFINITY, 0);
      top = fmaxf(top, mine[i].x);
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    old[row] = exp2_approx((state.maximum[row] - top) * scale_log2);
    state.maximum[row] = top;
    state.sum[row] *= old[row];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      weight[i][row] = exp2_approx((mine[i].x - top) * scale_log2);
      state.sum[row] = fmaf(mine[i].y, weight[i][row], state.sum[row]);
    }
  }
#pragma unroll
  for (int j = 0; j < 64; ++j) o[j] *= old[j / 2 % 2];
}

// O += weight * partial result, whose 16-byte words load(i) gives.
template <typename Load>
__device__ __forceinline__ void add_partial(float (&o)[64], const Load& load,
                                            const float (&weight)[2]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 words = load(i);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      o[8 * i + 2 * j] = fmaf(unpack_bf16_low(w[j]), weight[j % 2], o[8 * i + 2 * j]);
      o[8 * i + 2 * j + 1] = fmaf(unpack_bf16_high(w[j]), weight[j % 2], o[8 * i + 2 * j + 1]);
    }
  }
}

}  // namespace m3::attend_tile_detail
