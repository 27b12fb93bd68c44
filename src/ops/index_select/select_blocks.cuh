// Exact top-k of one row's block scores by one CTA (msa.md §3: score descending, then lower block id).
//
// A threshold cuts the row down first: the scores are dealt to 32 groups, block b to group b % 32. The
// kth largest of the group maxima is a lower bound of the kth largest score, and at most k groups hold
// anything above it, so few candidates are left (about 22 of 1,024 random scores for k = 15, at most
// k/32 of the row). They are ranked by counting. Keys are (score, ~block) in 64 bits: all distinct, so
// ties need no special case and every step is exact.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace m3 {

constexpr int kSelectGroups = 32;
constexpr int kSelectMaxTopk = 32;     // own block included: at most 31 history blocks are searched
constexpr int kSelectMaxBlocks = 8192;  // 2^20 tokens

// Shared memory of select_blocks for rows of at most max_blocks scores: keys by group, two candidate
// lists, group maxima.
constexpr int64_t select_scratch_bytes(int64_t max_blocks, int topk) {
  const int64_t per_group = (max_blocks + kSelectGroups - 1) / kSelectGroups;
  const int64_t list = per_group * (topk - 1);
  return max_blocks * 4 + 16 + 2 * (list < 2 * 128 ? 2 * 128 : list) * 8;
}

struct SelectShared {
  uint64_t thread_max[128];
  uint64_t threshold;
  int count;
  int32_t chosen[kSelectMaxTopk];
};

// Ascending as unsigned numbers wherever the scores ascend; -inf gives 0x007fffff, so 0 stands for none.
__device__ __forceinline__ uint32_t ordered_bits(float score) {
  const uint32_t bits = __float_as_uint(score);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of_bits(uint32_t ordered) {
  return __uint_as_float((ordered & 0x80000000u) ? ordered & 0x7fffffffu : ~ordered);
}
__device__ __forceinline__ uint64_t select_key(float score, int block) {
  return (uint64_t{ordered_bits(score)} << 32) | (0xffffffffu - static_cast<uint32_t>(block));
}

__device__ __forceinline__ uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The kth largest (k >= 1) of 32 group maxima; 0 if fewer than k groups hold a key. thread_max has one
// entry per thread of four warps; every warp computes the same result on its own.
__device__ __forceinline__ uint64_t group_threshold(const uint64_t* thread_max, int k, int lane) {
  uint64_t own = 0;
  for (int w = 0; w < 4; ++w) own = max_u64(own, thread_max[32 * w + lane]);
  int rank = 0;
#pragma unroll 8
  for (int other = 0; other < 32; ++other) rank += __shfl_sync(0xffffffffu, own, other) > own ? 1 : 0;
  // Keys are distinct; empty groups (0) share a rank beyond all keys.
  const uint32_t holder = __ballot_sync(0xffffffffu, rank == k - 1 && own != 0);
  return holder == 0 ? 0 : __shfl_sync(0xffffffffu, own, __ffs(holder) - 1);
}

// All of 128 threads (one barrier id) call it with the same arguments: `history` scores of a row in
// global memory (written by an earlier kernel), the best `wanted` of them go to ids[0 .. wanted), their
// block ids ascending, in shared memory. 1 <= wanted <= 31, wanted <= history <= kSelectMaxBlocks.
// `sync` is a barrier of the 128 threads; the last one is inside.
template <typename Sync>
__device__ __forceinline__ void select_blocks(const float* __restrict__ scores, int history, int wanted,
                                              uint8_t* scratch, SelectShared& shared, int32_t* ids, int thread,
                                              Sync sync) {
  constexpr int kThreads = 128;
  const int lane = thread % 32;
  float* values = reinterpret_cast<float*>(scratch);
  const int64_t list_bytes = int64_t{8} * max(2 * kThreads, wanted * ((history + kSelectGroups - 1) / kSelectGroups));
  uint64_t* list = reinterpret_cast<uint64_t*>(scratch + ((history * 4 + 15) & ~15));
  uint64_t* next_list = reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(list) + list_bytes);

  // 1. Own scores into registers and shared memory, their best key.
  uint64_t best = 0;
  for (int base = 0; base < history; base += 8 * kThreads) {
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int block = base + i * kThreads + thread;
      if (block < history) value[i] = __ldcg(scores + block);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int block = base + i * kThreads + thread;
      if (block >= history) break;
      values[block] = value[i];
      best = max_u64(best, select_key(value[i], block));
    }
  }
  shared.thread_max[thread] = best;
  if (thread == 0) shared.count = 0;
  sync();

  // 2. Candidates: everything at or above the threshold.
  const uint64_t threshold = group_threshold(shared.thread_max, wanted, lane);
  if (best >= threshold && best != 0) {
    for (int block = thread; block < history; block += kThreads) {
      const uint64_t key = select_key(values[block], block);
      if (key >= threshold) list[atomicAdd(&shared.count, 1)] = key;
    }
  }
  sync();
  int count = shared.count;

  // 3. Unusual rows leave many: deal them to new groups and cut again. Each round keeps at most
  // wanted/32 of the list plus one per group, so it ends.
  while (count > kThreads) {
    best = 0;
    for (int i = thread; i < count; i += kThreads) best = max_u64(best, list[i]);
    shared.thread_max[thread] = best;
    sync();
    if (thread == 0) shared.count = 0;
    const uint64_t cut = group_threshold(shared.thread_max, wanted, lane);
    sync();
    for (int i = thread; i < count; i += kThreads) {
      if (list[i] >= cut) next_list[atomicAdd(&shared.count, 1)] = list[i];
    }
    sync();
    count = shared.count;
    uint64_t* swap = list;
    list = next_list;
    next_list = swap;
  }

  // 4. Rank by counting, then place by id.
  if (thread < count) {
    const uint64_t own = list[thread];
    int rank = 0;
    for (int i = 0; i < count; ++i) rank += list[i] > own ? 1 : 0;
    if (rank < wanted) shared.chosen[rank] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(own));
  }
  sync();
  if (thread < wanted) {
    const int own = shared.chosen[thread];
    int place = 0;
    for (int i = 0; i < wanted; ++i) place += shared.chosen[i] < own ? 1 : 0;
    ids[place] = own;
  }
  sync();
}

}  // namespace m3
