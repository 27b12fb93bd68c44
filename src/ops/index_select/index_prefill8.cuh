// What the kernels of index_prefill8 share: the workspace, the parameters, lists of candidates in
// registers.
#pragma once
#include "ops/index_select/index_prefill.cuh"
#include "ops/index_select/index_prefill8.h"

namespace m3::index_prefill8_detail {

using namespace index_prefill;

constexpr int kTopk = 16;
constexpr int kExactCandidates = 64;
constexpr uint32_t kAll = 0xffffffffu;

struct RescoreItem {
  int32_t page, begin, count;  // pairs
};

// Device pointers into the caller's workspace. Rows of a chunk: its own, and the rest of its last
// tile.
struct Workspace : Schedule {
  void* lists;         // [lists][256][C] entries
  int8_t* codes;       // [rows, 128]
  void* candidates;    // [rows, C] entries, best first; 0: none
  int32_t* place;      // [rows, C]: of the pair among its page's
  int32_t* pairs;      // [rows * C]: row * C + slot, sorted by page
  float* score;        // [rows, C]: in bf16
  int32_t* count;       // [pages]
  int32_t* page_begin;  // [pages]: first pair
  RescoreItem* rescore_items;
  int32_t* num_rescore_items;
  float4* query_stat;   // [rows]: scale, and what error_P and norm_P add to a score (exact)
  int32_t* tile_flags;  // [tile numbers]: 1: has a row without a certificate (exact)
  void* bf16;           // of the second scan (exact)
  void* end;
};

struct Params {
  MsaBatch batch;
  int groups, first_row, end_row, num_pages, id_bits;
  const void* qi_TRX;
  IndexKeys8 keys;
  int32_t* ids_RTK;
  int32_t* uncertified;
  Workspace ws;
};

// Quantises the queries of the chunk's rows and finds every row's candidates: kernels quantise,
// schedule, scan and merge. kCandidates: 15, 24, 32 or 64.
template <int kCandidates>
void find_candidates(const IndexPrefill8Params& args, const Params& p, int buffer_rows, int sms,
                     cudaStream_t stream);

// Order of floats as order of unsigned integers; above 0 for every finite value.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
}

// --- lists of candidates in registers. An entry is an unsigned integer that is larger the better
// the candidate is; 0: free.

// Score and id of the best kLength, exactly (approx).
template <int kLength>
struct ScoreList {
  using Entry = uint64_t;
  static __device__ __forceinline__ int id(Entry entry, int /*bits*/) {
    return static_cast<int>(0xffffffffu - static_cast<uint32_t>(entry));
  }
  TopkList<kLength> list;

  __device__ __forceinline__ void clear(int /*bits*/) { list.clear(); }
  __device__ __forceinline__ void add(float score, int block) {
    if (score >= list.threshold()) list.insert_lower_id(score, block);
  }
  __device__ __forceinline__ Entry entry(int j) const {
    return list.id[j] < 0 ? 0
                          : Entry{ordered_bits(list.score[j])} << 32 |
                                (0xffffffffu - static_cast<uint32_t>(list.id[j]));
  }
};

// One word each: the upper bits of the score and the complement of the id (rescore).
template <int kLength>
struct PackedList {
  using Entry = uint32_t;
  static __device__ __forceinline__ int id(Entry entry, int bits) {
    const uint32_t mask = (1u << bits) - 1;
    return static_cast<int>(mask - (entry & mask));
  }
  uint32_t key[kLength];
  uint32_t mask;

  __device__ __forceinline__ void clear(int bits) {
    mask = (1u << bits) - 1;
#pragma unroll
    for (int j = 0; j < kLength; ++j) key[j] = 0;
  }
  __device__ __forceinline__ void add(float score, int block) {
    const uint32_t x = (ordered_bits(score) & ~mask) | (mask - static_cast<uint32_t>(block));
    if (x <= key[kLength - 1]) return;
#pragma unroll
    for (int j = kLength - 1; j > 0; --j) key[j] = max(key[j], min(key[j - 1], x));
    key[0] = max(key[0], x);
  }
  __device__ __forceinline__ Entry entry(int j) const { return key[j]; }
  // No score of an entry like this one, or of one that lost against it, is larger.
  static __device__ __forceinline__ float largest_score(Entry entry, int bits) {
    const uint32_t ordered = entry | ((1u << bits) - 1);
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
  }
};

template <int kCandidates>
struct ListOf {
  using Type = PackedList<kCandidates>;
};
template <>
struct ListOf<kTopk - 1> {
  using Type = ScoreList<kTopk - 1>;
};

}  // namespace m3::index_prefill8_detail
