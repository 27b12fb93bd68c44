// What the Hopper prefill kernels of index_select share: the cut of a call into items, and the
// writing of a row's ids. A tile is 256 rows (row = query * R + group) of one sequence.
#pragma once
#include <cuda_runtime.h>

#include "hopper/fence.cuh"
#include "ops/common/cta_scan.cuh"
#include "ops/common/device_workspace.h"
#include "ops/common/msa_device.cuh"
#include "ops/index_select/topk_list.cuh"
#include "tensor/cuda_check.h"

namespace m3::index_prefill {

using namespace hopper;

constexpr int kDim = 128, kBlock = 128;
constexpr int kTileRows = 256;
constexpr int kWaves = 2;  // target items per SM: at most 1.5 x the ideal length for any mix of tiles
constexpr int kMaxSms = 160;  // workspaces are sized without a device

struct ScanItem {
  int32_t seq, tile;
  int32_t first_block, last_block;  // [first, last), scanned from last - 1 down
  int32_t list;                     // lists[list][256 rows]; -1: this item has the whole row
};
struct MergeItem {
  int32_t seq, tile, list, num_lists;
};

// Counters: 0 items, 1 next item, 2 lists, 3 merge items.
struct Schedule {
  int32_t* counters;
  ScanItem* items;
  MergeItem* merges;

  static int64_t max_items(int64_t rows, int num_seqs, int sms) {
    return rows / kTileRows + num_seqs + 1 + int64_t{kWaves} * sms;
  }
  static constexpr int64_t max_lists(int sms) {
    return int64_t{kWaves} * sms;
  }
};

// Maxima of the two rows of an m64n128 product that a lane holds, over its columns.
template <typename T>
__device__ __forceinline__ void row_maxima(const T (&acc)[64], T& upper, T& lower) {
  upper = max(acc[0], acc[1]);
  lower = max(acc[2], acc[3]);
#pragma unroll
  for (int j = 4; j < 64; j += 4) {
    upper = max(upper, max(acc[j], acc[j + 1]));
    lower = max(lower, max(acc[j + 2], acc[j + 3]));
  }
}

// Blocks that the rows of a tile may choose from beyond their own: 0 .. result-1. Zero if no row
// needs scores.
__device__ __forceinline__ int tile_history(const MsaSequence& s, int tile, int groups, int topk) {
  const int last_row = min((tile + 1) * kTileRows, s.q_len * groups) - 1;
  const int position = s.first_position + last_row / groups;
  if (position < 0) return 0;
  const int own = position / kBlock;
  return own + 1 > topk ? own : 0;
}

// Tiles of the whole call are numbered by their first row; sequences need not begin at a multiple.
__device__ __forceinline__ int tile_number(int first_row, int seq) {
  return first_row / kTileRows + seq;
}

// Items of the tiles that begin in rows [first_row, end_row) of the call, longest first. tile_flags,
// if present, leaves out the tiles whose number has no flag.
static __global__ void __launch_bounds__(1024)
    schedule_kernel(const MsaBatch batch, int groups, int topk, int sms, int first_row, int end_row,
                    const int32_t* tile_flags, Schedule to) {
  constexpr int kBuckets = 1024;
  __shared__ int bucket[kBuckets];  // items by length, longest first
  __shared__ int scratch[32];
  __shared__ unsigned long long total_blocks;
  __shared__ int num_items, num_lists, num_merges;
  const int tid = threadIdx.x;
  grid_dependency_launch();  // the scan's CTAs may take their places
  bucket[tid] = 0;
  if (tid == 0) {
    total_blocks = 0;
    num_items = num_lists = num_merges = 0;
  }
  __syncthreads();

  const auto each_tile = [&](const auto& visit) {
    for (int n = 0; n < batch.num_seqs; ++n) {
      const MsaSequence s = msa_sequence(batch, n);
      const int tiles = (s.q_len * groups + kTileRows - 1) / kTileRows;
      for (int t = tid; t < tiles; t += 1024) {
        const int row = s.q_begin * groups + t * kTileRows;
        const bool wanted = tile_flags == nullptr || tile_flags[tile_number(row, n)] != 0;
        if (wanted && row >= first_row && row < end_row)
          visit(n, t, tile_history(s, t, groups, topk));
      }
    }
  };
  unsigned long long sum = 0;
  each_tile([&](int, int, int history) { sum += history; });
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (tid % 32 == 0) atomicAdd(&total_blocks, sum);
  __syncthreads();
  // Rounded up: one item more than kWaves * sms would be a wave of its own.
  const int target = max(8, static_cast<int>((total_blocks + kWaves * sms - 1) / (kWaves * sms)));

  const auto bucket_of = [](int length) { return kBuckets - 1 - min(length / 8, kBuckets - 1); };
  each_tile([&](int, int, int history) {
    const int splits = max(1, history / target);
    atomicAdd(&bucket[bucket_of(history / splits)], splits);
  });
  __syncthreads();
  const int own = bucket[tid];
  const int inclusive = cta_scan_1024(own, scratch);
  bucket[tid] = inclusive - own;
  if (tid == kBuckets - 1) num_items = inclusive;
  __syncthreads();
  each_tile([&](int n, int t, int history) {
    const int splits = max(1, history / target);
    int list = -1;
    if (splits > 1) {
      list = atomicAdd(&num_lists, splits);
      to.merges[atomicAdd(&num_merges, 1)] = {n, t, list, splits};
    }
    const int at = atomicAdd(&bucket[bucket_of(history / splits)], splits);
    for (int i = 0; i < splits; ++i) {
      const int first = static_cast<int>(int64_t{history} * i / splits);
      const int last = static_cast<int>(int64_t{history} * (i + 1) / splits);
      to.items[at + i] = {n, t, first, last, list < 0 ? -1 : list + i};
    }
  });
  __syncthreads();
  if (tid == 0) {
    to.counters[0] = num_items;
    to.counters[1] = 0;
    to.counters[2] = num_lists;
    to.counters[3] = num_merges;
  }
}

// ids of one finished row: `chosen` in any order (history), then the own block.
template <int kTopk>
__device__ __forceinline__ void write_row(int32_t (&chosen)[kTopk - 1], int own, int32_t* ids) {
  int32_t row[kTopk];
  if (own + 1 > kTopk) {
    sort_ascending(chosen);
#pragma unroll
    for (int j = 0; j + 1 < kTopk; ++j) row[j] = chosen[j];
    row[kTopk - 1] = own;
  } else {
#pragma unroll
    for (int j = 0; j < kTopk; ++j) row[j] = j <= own ? j : -1;
  }
#pragma unroll
  for (int j = 0; j < kTopk; j += 4) {
    *reinterpret_cast<int4*>(ids + j) = make_int4(row[j], row[j + 1], row[j + 2], row[j + 3]);
  }
}

}  // namespace m3::index_prefill
