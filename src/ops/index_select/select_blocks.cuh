// Exact top-k of one row's block scores by one CTA (msa.md §3: score descending, then lower block
// id).
//
// A threshold cuts the row down first. The scores are dealt to 32 (or 128) groups; the kth largest
// of the group maxima is a lower bound of the kth largest score, and few scores lie above it: about
// 20 of 1,000 or 8,000 random ones for k = 15. Those are ranked by counting on 64-bit keys (score,
// ~block), all distinct, so ties need no special case. Rows with many equal or crowded scores leave
// more candidates; rounds of the same cut on the full keys shrink them. Every step is exact.
//
// The code runs once per launch, so latency counts: all scores are loaded at once into registers,
// loops are short and independent, and what follows a choice (its page) is fetched while ranks are
// counted.
#pragma once
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace m3 {

constexpr int kSelectThreads = 256;
constexpr int kSelectMaxTopk = 32;      // own block included
constexpr int kSelectMaxBlocks = 8192;  // 2^20 tokens

// kGroups maxima give the threshold for up to kGroups blocks, tight for up to half as many.
constexpr int select_groups(int most) {
  return most < 32 ? 32 : 128;
}

// Shared memory for the rare rows with more than kSelectThreads candidates: two lists, the second
// of what a cut leaves.
constexpr int64_t select_scratch_bytes(int64_t max_blocks, int wanted) {
  const int groups = select_groups(wanted);
  return 8 * (max_blocks + 2 + (max_blocks + groups - 1) / groups * wanted);
}

// kMost: the largest `wanted`, a multiple of 4.
template <int kMost>
struct alignas(16) SelectShared {
  uint64_t keys[kSelectThreads];  // the threads' best, and once these are read, the candidates
  int32_t chosen[kMost];
  uint64_t cut;
  uint32_t threshold;
  int count;
};

// Ascending as unsigned numbers wherever the scores ascend; -inf gives 0x007fffff, so 0 stands for
// none.
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
__device__ __forceinline__ int block_of_key(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// The kth largest of the 32 lanes' kPerLane values each, or 0 if fewer than k are not 0. k is at
// most 32 kPerLane; the same result in all lanes.
template <int kPerLane>
__device__ __forceinline__ uint32_t kth_largest(const uint32_t (&own)[kPerLane], int k) {
  int larger[kPerLane] = {};
#pragma unroll
  for (int lane = 0; lane < 32; ++lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t other = __shfl_sync(0xffffffffu, own[i], lane);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) larger[j] += other > own[j] ? 1 : 0;
    }
  }
  uint32_t least = 0xffffffffu;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) least = larger[j] < k ? min(least, own[j]) : least;
  return __reduce_min_sync(0xffffffffu, least);
}

// One of the rounds for rows with crowded scores: keeps the keys of `list` at or above the kth
// largest of the maxima of 32 kPerLane groups. Returns how many: less than before.
template <int kPerLane, typename Shared, typename Sync>
__device__ __forceinline__ int select_cut(const uint64_t* list, int count, uint64_t* kept,
                                          int wanted, Shared& shared, int thread, Sync sync) {
  uint64_t best = 0;
  for (int i = thread; i < count; i += kSelectThreads) best = list[i] > best ? list[i] : best;
  shared.keys[thread] = best;
  sync();
  if (thread == 0) shared.count = 0;
  if (thread < 32) {
    uint64_t group[kPerLane];
    uint32_t part[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      group[j] = 0;
      for (int w = j; w < kSelectThreads / 32; w += kPerLane) {
        const uint64_t other = shared.keys[32 * w + thread];
        group[j] = other > group[j] ? other : group[j];
      }
      part[j] = static_cast<uint32_t>(group[j] >> 32);
    }
    // The score of the kth, then its lower half among the equal scores.
    const uint32_t high = kth_largest<kPerLane>(part, wanted);
    int above = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      above += __popc(__ballot_sync(0xffffffffu, part[j] > high));
      part[j] = part[j] == high ? static_cast<uint32_t>(group[j]) : 0;
    }
    const uint32_t low = kth_largest<kPerLane>(part, wanted - above);
    if (thread == 0) shared.cut = (uint64_t{high} << 32) | low;
  }
  sync();
  for (int i = thread; i < count; i += kSelectThreads) {
    if (list[i] >= shared.cut) kept[atomicAdd(&shared.count, 1)] = list[i];
  }
  sync();
  return shared.count;
}

// 256 threads call it with the same arguments: `scores`, a row of `history` in global memory
// (16-byte aligned, written by an earlier kernel). For each of the best `wanted` one thread calls
// emit(place, block, fetched): place is its position among the ids in ascending order, fetched what
// fetch(block), called earlier and for some other blocks too, returned. Meanwhile another warp
// calls hint(block) for the same candidates. 1 <= wanted <= kMost, wanted <= history <=
// kSelectMaxBlocks. `sync` is a barrier of the 256 threads; what emit writes is seen after the next
// one. Returns whether `scratch` was written.
template <int kMost, typename Sync, typename Fetch, typename Hint, typename Emit>
__device__ __forceinline__ bool select_blocks(const float* __restrict__ scores, int history,
                                              int wanted, uint8_t* scratch,
                                              SelectShared<kMost>& shared, int thread, Sync sync,
                                              Fetch fetch, Hint hint, Emit emit) {
  constexpr int kPerLane = select_groups(kMost - 1) / 32;
  constexpr int kVectors = kSelectMaxBlocks / 4 / kSelectThreads;
  const int lane = thread % 32;
  uint32_t* thread_max = reinterpret_cast<uint32_t*>(shared.keys);

  // 1. Scores 4v .. 4v+3 with v = thread, thread + 256, ...; the best of them.
  float value[kVectors][4];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * 4 * kSelectThreads >= history) break;
    const int first = 4 * (i * kSelectThreads + thread);
    value[i][0] = value[i][1] = value[i][2] = value[i][3] = -INFINITY;
    if (first + 4 <= history) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(scores + first));
      value[i][0] = four.x, value[i][1] = four.y, value[i][2] = four.z, value[i][3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        if (first + e < history) value[i][e] = __ldcg(scores + first + e);
      }
    }
  }
  if (thread < kMost) shared.chosen[thread] = INT_MAX;
  if (thread == 0) shared.count = 0;
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * 4 * kSelectThreads >= history) break;
    top = fmaxf(top, fmaxf(fmaxf(value[i][0], value[i][1]), fmaxf(value[i][2], value[i][3])));
  }
  const uint32_t best = 4 * thread < history ? ordered_bits(top) : 0;
  thread_max[thread] = best;
  sync();

  // 2. Candidates: scores at or above the threshold. One warp finds it; eight would wait for one
  // another.
  if (thread < 32) {
    uint32_t group[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      group[j] = 0;
#pragma unroll
      for (int w = j; w < kSelectThreads / 32; w += kPerLane)
        group[j] = max(group[j], thread_max[32 * w + lane]);
    }
    const uint32_t kth = kth_largest<kPerLane>(group, wanted);
    if (thread == 0) shared.threshold = kth;
  }
  sync();
  const uint32_t threshold = shared.threshold;
  const float low = threshold == 0 ? -INFINITY : score_of_bits(threshold);
  const bool some = best >= threshold && best != 0;
  int at = 0;
  if (some) {
    int hits = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * 4 * kSelectThreads >= history) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        hits += value[i][e] >= low && 4 * (i * kSelectThreads + thread) + e < history ? 1 : 0;
      }
    }
    at = atomicAdd(&shared.count, hits);
  }
  sync();
  int count = shared.count;
  const bool crowded = count > kSelectThreads;
  uint64_t* list = crowded ? reinterpret_cast<uint64_t*>(scratch) : shared.keys;
  if (some) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * 4 * kSelectThreads >= history) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int block = 4 * (i * kSelectThreads + thread) + e;
        if (value[i][e] >= low && block < history) list[at++] = select_key(value[i][e], block);
      }
    }
  }
  sync();
  if (crowded) {
    uint64_t* next_list = list + ((history + 1) & ~1);
    while (count > kSelectThreads) {
      count = select_cut<kPerLane>(list, count, next_list, wanted, shared, thread, sync);
      uint64_t* swap = list;
      list = next_list;
      next_list = swap;
    }
  }

  // 3. Rank by counting, then place by id. Candidates lie with the first threads, so hints come
  // from the last.
  const bool candidate = thread < count;
  const uint64_t own = candidate ? list[thread] : 0;
  const int block = block_of_key(own);
  int fetched = 0, rank = 0;
  if (candidate) {
    fetched = fetch(block);
#pragma unroll 8
    for (int i = 0; i < count; ++i) rank += list[i] > own ? 1 : 0;
    if (rank < wanted) shared.chosen[rank] = block;
  }
  const int mirrored = kSelectThreads - 1 - thread;
  if (mirrored < count) hint(block_of_key(list[mirrored]));
  sync();
  if (candidate && rank < wanted) {
    int place = 0;
#pragma unroll
    for (int i = 0; i < kMost; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(&shared.chosen[i]);
      place += (four.x < block ? 1 : 0) + (four.y < block ? 1 : 0) + (four.z < block ? 1 : 0) +
               (four.w < block ? 1 : 0);
    }
    emit(place, block, fetched);
  }
  return crowded;
}

}  // namespace m3
