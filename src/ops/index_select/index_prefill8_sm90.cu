// Prefill selection with int8 index keys. Kernels of a chunk of rows (row = query * R + group):
//   quantise  int8 codes of the queries
//   schedule  items (index_prefill.cuh)
//   scan      all block scores in int8, each row's best candidates
//   merge     joins the lists of tiles whose keys were cut
//   count, place, scatter    (rescore) pairs of row and candidate, sorted by page
//   rescore   block-outer: a page of bf16 keys against the rows that have it as candidate
//   choose    the row's ids, and (exact) whether they are certified
// exact: tiles with a row that is not are scanned again in bf16, by the kernels of index_select_sm90.
//
// scan: as index_select_sm90.cu, with products of m64n128k32: 256 rows x one block per step.
// Shared memory: 2 Q tiles x 32 KB, 8 key stages x 16 KB = 192 KB, 128-byte swizzle.
// rescore: 4 CTAs an SM, 32 KB of keys each; queries go from global memory straight to the
// registers of the product's A operand. 2 * 128 * 128 FLOP and 256 bytes of a query per pair.
#include <algorithm>
#include <climits>

#include "hopper/dependent_launch.cuh"
#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ops/index_select/index_codes8.cuh"
#include "ops/index_select/index_prefill.cuh"
#include "ops/index_select/index_prefill8.h"
#include "ops/index_select/index_select_cuda.h"

namespace m3 {
namespace {

using namespace hopper;
using namespace index_prefill;

constexpr int kTopk = 16;
constexpr int kStages = 8, kQueryBuffers = 2;
constexpr int kKeyBytes = kBlock * kDim, kQueryBytes = kTileRows * kDim;  // int8
constexpr int kSmemBytes = kQueryBuffers * kQueryBytes + kStages * kKeyBytes + 1024;
constexpr int kScanThreads = 384;
constexpr int kChunkQueries = 33792;  // at 4 groups 4 tiles for each of 132 SMs: whole waves
constexpr int kItemPairs = 256;
constexpr int kMaxIdBits = 17;
constexpr int kExactCandidates = 64;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int kCountStride = 8;  // a counter a sector: neighbouring pages are counted together
constexpr float kUp = 1.0f + 0x1p-16f;  // over the rounding of a sum of 128 squares in fp32

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
  int32_t* count;       // [pages * kCountStride]
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

// --- what a row of the chunk is

struct Row {
  int32_t query, group;
  int32_t own;  // -1: an empty row
  bool mine;    // of the call, and of a tile that begins in this chunk
  bool choice;  // has more blocks than it may take
  MsaSequence seq;
};

__device__ __forceinline__ Row row_of(const Params& p, int local) {
  Row row;
  const int at = p.first_row + local;
  row.query = at / p.groups;
  row.group = at % p.groups;
  row.mine = row.query < p.batch.num_queries;
  row.own = -1;
  row.choice = false;
  if (!row.mine) return row;
  row.seq = msa_sequence(p.batch, msa_find(p.batch.cu_q, p.batch.num_seqs, row.query));
  const int row0 = row.seq.q_begin * p.groups, tile0 = row0 + (at - row0) / kTileRows * kTileRows;
  row.mine = tile0 >= p.first_row && tile0 < p.end_row;
  const int position = row.seq.first_position + row.query - row.seq.q_begin;
  if (position >= 0) row.own = position / kBlock;
  row.choice = row.mine && row.own + 1 > kTopk;
  return row;
}

// --- quantise: a warp per row

__global__ void __launch_bounds__(256) quantise_kernel(const Params p, int num_rows) {
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (local >= num_rows) return;
  uint32_t codes = 0;
  float scale = 0, norm2 = 0, error2 = 0;
  if (int64_t{p.first_row} + local < p.batch.num_queries * p.groups) {
    const uint2 packed = static_cast<const uint2*>(
        p.qi_TRX)[(int64_t{p.first_row} + local) * (kDim / 4) + lane];
    const float x[4] = {unpack_bf16_low(packed.x), unpack_bf16_high(packed.x),
                        unpack_bf16_low(packed.y), unpack_bf16_high(packed.y)};
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, finite_abs(x[i]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    scale = __fdiv_rn(largest, 127.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int code = code_of(x[i], scale);
      codes |= (static_cast<uint32_t>(code) & 0xffu) << (8 * i);
      const float difference = fmaf(scale, static_cast<float>(code), -x[i]);
      norm2 += x[i] * x[i];
      error2 += difference * difference;
    }
  }
  reinterpret_cast<uint32_t*>(p.ws.codes)[local * (kDim / 4) + lane] = codes;
  if (p.uncertified == nullptr) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    norm2 += __shfl_xor_sync(kAll, norm2, step);
    error2 += __shfl_xor_sync(kAll, error2, step);
  }
  if (lane == 0) {
    const float norm = sqrtf(norm2) * kUp, error = sqrtf(error2) * kUp;
    p.ws.query_stat[local] = {scale, (norm + error) / scale, (error + 0x1p-13f * norm) / scale, 0};
  }
}

// --- scan

struct __align__(8) ScanBarriers {
  uint64_t query_full[kQueryBuffers], query_empty[kQueryBuffers];
  uint64_t key_full[kStages], key_empty[kStages];
};

// Issues one m64n128k128 product (four instructions) and commits it.
__device__ __forceinline__ void issue_scores(int32_t (&acc)[64], uint64_t query, uint64_t keys) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    wgmma_s8_ss(acc, descriptor_advance(query, k * 32), descriptor_advance(keys, k * 32),
                k == 0 ? 0 : 1);
  }
  wgmma_commit();
}

// Maxima of the two rows that a lane holds.
__device__ __forceinline__ void reduce_rows(const int32_t (&acc)[64], int& upper, int& lower) {
  upper = max(acc[0], acc[1]);
  lower = max(acc[2], acc[3]);
#pragma unroll
  for (int j = 4; j < 64; j += 4) {
    upper = max(upper, max(acc[j], acc[j + 1]));
    lower = max(lower, max(acc[j + 2], acc[j + 3]));
  }
}

__device__ __forceinline__ void produce(const Params& p, const CUtensorMap& query_map,
                                        const CUtensorMap& key_map, char* smem_query,
                                        char* smem_keys, ScanBarriers& bars, ScanItem* slots,
                                        float4* stage_key, int lane) {
  const int num_items = p.ws.counters[0];
  int step = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    int index = 0;
    if (lane == 0) {
      index = atomicAdd(&p.ws.counters[1], 1);
      mbarrier_wait(&bars.query_empty[buffer], (round / kQueryBuffers & 1) ^ 1);
    }
    index = __shfl_sync(kAll, index, 0);
    ScanItem item = {-1, 0, 0, 0, -1};
    if (index < num_items) item = p.ws.items[index];
    if (lane == 0) slots[buffer] = item;
    if (item.seq < 0) {
      if (lane == 0) mbarrier_arrive(&bars.query_full[buffer]);
      return;
    }
    const MsaSequence seq = msa_sequence(p.batch, item.seq);
    if (lane == 0) {
      mbarrier_arrive_expect_tx(&bars.query_full[buffer], kQueryBytes);
      tma_load(smem_query + buffer * kQueryBytes, &query_map, &bars.query_full[buffer], 0,
               seq.q_begin * p.groups + item.tile * kTileRows - p.first_row);
    }
    const int32_t* pages = p.batch.page_table + item.seq * p.batch.max_pages;
    // Page numbers and scales are read 32 at a time; the copies are issued one by one.
    for (int top = item.last_block; top > item.first_block; top -= 32) {
      const int mine = top - 1 - lane;
      const int page = mine >= item.first_block ? pages[mine] : 0;
      float4 key = {p.keys.scale_P[page], 0, 0, 0};
      if (p.uncertified != nullptr) key.y = p.keys.error_P[page], key.z = p.keys.norm_P[page];
      const int count = min(32, top - item.first_block);
      for (int j = 0; j < count; ++j, ++step) {
        const int key_page = __shfl_sync(kAll, page, j);
        const float4 its = {__shfl_sync(kAll, key.x, j), __shfl_sync(kAll, key.y, j),
                            __shfl_sync(kAll, key.z, j), 0};
        if (lane == 0) {
          const int stage = step % kStages;
          mbarrier_wait(&bars.key_empty[stage], (step / kStages & 1) ^ 1);
          stage_key[stage] = its;
          mbarrier_arrive_expect_tx(&bars.key_full[stage], kKeyBytes);
          tma_load(smem_keys + stage * kKeyBytes, &key_map, &bars.key_full[stage], 0,
                   key_page * kBlock);
        }
        __syncwarp();
      }
    }
  }
}

template <int kCandidates>
__device__ __forceinline__ void consume(const Params& p, const char* smem_query,
                                        const char* smem_keys, ScanBarriers& bars,
                                        const ScanItem* slots, const float4* stage_key,
                                        int consumer, int warp, int lane) {
  using List = typename ListOf<kCandidates>::Type;
  constexpr bool kBounds = kCandidates == kExactCandidates;  // zero where they are not wanted
  const bool lower_row = lane & 1, second_tile = lane & 2;
  const int my_row =
      consumer * 128 + (second_tile ? 64 : 0) + warp % 4 * 16 + lane / 4 + (lower_row ? 8 : 0);
  const uint64_t key_descriptor = descriptor_k_major(smem_keys);
  int step = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    mbarrier_wait(&bars.query_full[buffer], round / kQueryBuffers & 1);
    const ScanItem item = slots[buffer];
    if (item.seq < 0) return;
    const MsaSequence seq = msa_sequence(p.batch, item.seq);
    const int flat_row = item.tile * kTileRows + my_row;
    const bool live = flat_row < seq.q_len * p.groups;
    const int position = seq.first_position + flat_row / p.groups;
    const int own = live && position >= 0 ? position / kBlock : -1;

    float query_error = 0, query_norm = 0;
    if (kBounds && live && p.uncertified != nullptr) {
      const float4 stat =
          p.ws.query_stat[seq.q_begin * p.groups + flat_row - p.first_row];
      query_error = stat.y, query_norm = stat.z;
    }
    List list;
    list.clear(p.id_bits);
    const uint64_t query_descriptor =
        descriptor_k_major(smem_query + buffer * kQueryBytes + consumer * 128 * kDim);
    int32_t acc0[64], acc1[64];
    for (int block = item.last_block - 1; block >= item.first_block; --block, ++step) {
      const int stage = step % kStages;
      const uint64_t keys = descriptor_advance(key_descriptor, stage * kKeyBytes);
      mbarrier_wait(&bars.key_full[stage], step / kStages & 1);
      issue_scores(acc0, query_descriptor, keys);
      issue_scores(acc1, descriptor_advance(query_descriptor, 64 * kDim), keys);
      // One lane reads: it is the one that gives the stage back.
      float4 key = {0, 0, 0, 0};
      if (lane == 0) key = stage_key[stage];
      key.x = __shfl_sync(kAll, key.x, 0);
      if constexpr (kBounds) {
        key.y = __shfl_sync(kAll, key.y, 0);
        key.z = __shfl_sync(kAll, key.z, 0);
      }
      int upper0, lower0, upper1, lower1;
      wgmma_wait<1>();
      wgmma_pin(acc0);
      reduce_rows(acc0, upper0, lower0);
      wgmma_wait<0>();
      wgmma_pin(acc1);
      if (lane == 0) mbarrier_arrive(&bars.key_empty[stage]);
      reduce_rows(acc1, upper1, lower1);
      // Quad reduction that leaves each lane one of the quad's four rows.
      const int give0 = __shfl_xor_sync(kAll, lower_row ? upper0 : lower0, 1);
      const int give1 = __shfl_xor_sync(kAll, lower_row ? upper1 : lower1, 1);
      const int row0 = max(lower_row ? lower0 : upper0, give0);
      const int row1 = max(lower_row ? lower1 : upper1, give1);
      const int other = __shfl_xor_sync(kAll, second_tile ? row0 : row1, 2);
      const int best = max(second_tile ? row1 : row0, other);
      float score = key.x * static_cast<float>(best) + 0.0f;
      if constexpr (kBounds) score = fmaf(query_error, key.y, fmaf(query_norm, key.z, score));
      if (block < own) list.add(score, block);
    }
    mbarrier_arrive(&bars.query_empty[buffer]);

    using Entry = typename List::Entry;
    Entry* to = nullptr;
    if (item.list >= 0) {
      to = static_cast<Entry*>(p.ws.lists) +
           (int64_t{item.list} * kTileRows + my_row) * kCandidates;
    } else if (live) {
      to = static_cast<Entry*>(p.ws.candidates) +
           int64_t{seq.q_begin * p.groups + flat_row - p.first_row} * kCandidates;
    }
    if (to != nullptr) {
#pragma unroll
      for (int j = 0; j < kCandidates; ++j) to[j] = list.entry(j);
    }
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_kernel(const __grid_constant__ CUtensorMap query_map,
                const __grid_constant__ CUtensorMap key_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const smem = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const smem_keys = smem + kQueryBuffers * kQueryBytes;
  __shared__ ScanBarriers bars;
  __shared__ ScanItem slots[kQueryBuffers];
  __shared__ float4 stage_key[kStages];
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(&bars.query_full[i], 1);
      mbarrier_init(&bars.query_empty[i], 256);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&bars.key_full[i], 1);
      mbarrier_init(&bars.key_empty[i], 8);  // one lane of each consumer warp
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  if (tid < 128) {
    registers_decrease<40>();
    if (tid < 32)
      produce(p, query_map, key_map, smem, smem_keys, bars, slots, stage_key, tid);
  } else {
    registers_increase<232>();
    consume<kCandidates>(p, smem, smem_keys, bars, slots, stage_key, tid / 128 - 1, tid / 32,
                         tid % 32);
  }
}

// --- merge: one warp per row of a split tile, a lane per list

constexpr int kMergeWarps = 4;

template <typename Entry>
__device__ __forceinline__ Entry warp_best(Entry x) {
  if constexpr (sizeof(Entry) == 4) {
    return __reduce_max_sync(kAll, x);
  } else {
    const uint32_t high = __reduce_max_sync(kAll, static_cast<uint32_t>(x >> 32));
    const uint32_t low =
        static_cast<uint32_t>(x >> 32) == high ? static_cast<uint32_t>(x) : 0u;
    return Entry{high} << 32 | __reduce_max_sync(kAll, low);
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(32 * kMergeWarps) merge_kernel(const Params p) {
  using Entry = typename ListOf<kCandidates>::Type::Entry;
  constexpr int kStride = kCandidates + 1 - kCandidates % 2;  // odd: heads lie in different banks
  __shared__ Entry heads[kMergeWarps][32 * kStride];
  const int lane = threadIdx.x % 32;
  Entry* mine = heads[threadIdx.x / 32] + lane * kStride;
  grid_dependency_wait();
  const int num_rows = p.ws.counters[3] * kTileRows;
  for (int work = (blockIdx.x * 32 * kMergeWarps + threadIdx.x) / 32; work < num_rows;
       work += gridDim.x * kMergeWarps) {
    const MergeItem item = p.ws.merges[work / kTileRows];
    const int row = work % kTileRows, flat_row = item.tile * kTileRows + row;
    const MsaSequence seq = msa_sequence(p.batch, item.seq);
    if (flat_row >= seq.q_len * p.groups) continue;
    const Entry* lists = static_cast<const Entry*>(p.ws.lists);
    Entry list[kCandidates];
#pragma unroll
    for (int j = 0; j < kCandidates; ++j) list[j] = 0;
    for (int l = lane; l < item.num_lists; l += 32) {
      const Entry* from = lists + (int64_t{item.list + l} * kTileRows + row) * kCandidates;
      Entry other[kCandidates];
#pragma unroll
      for (int j = 0; j < kCandidates; ++j) other[j] = from[j];
      if (l == lane) {
#pragma unroll
        for (int j = 0; j < kCandidates; ++j) list[j] = other[j];
      } else {  // both descend: the best of the two are the larger of list[j] and other[C - 1 - j]
#pragma unroll
        for (int j = 0; j < kCandidates; ++j) list[j] = max(list[j], other[kCandidates - 1 - j]);
#pragma unroll 1
        for (int sweep = 0; sweep < kCandidates; sweep += 2) {  // odd-even transposition
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
            for (int j = odd; j + 1 < kCandidates; j += 2) {
              const Entry low = min(list[j], list[j + 1]);
              list[j] = max(list[j], list[j + 1]);
              list[j + 1] = low;
            }
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kCandidates; ++j) mine[j] = list[j];
    __syncwarp();
    Entry* to = static_cast<Entry*>(p.ws.candidates) +
                int64_t{seq.q_begin * p.groups + flat_row - p.first_row} * kCandidates;
    int at = 0;
    Entry head = mine[0];
    for (int j = 0; j < kCandidates; ++j) {
      const Entry best = warp_best(head);
      if (head == best && best != 0) head = ++at < kCandidates ? mine[at] : 0;
      if (lane == 0) to[j] = best;
    }
    __syncwarp();
  }
}

// --- pairs by page: a warp per row

// visit(pair, page) for the candidates of a row.
template <int kCandidates, typename Visit>
__device__ __forceinline__ void each_candidate(const Params& p, int local, int lane,
                                               const Visit& visit) {
  using List = typename ListOf<kCandidates>::Type;
  const Row row = row_of(p, local);
  if (!row.choice) return;
  const int32_t* pages = p.batch.page_table + row.seq.index * p.batch.max_pages;
  for (int slot = lane; slot < kCandidates; slot += 32) {
    const int64_t pair = int64_t{local} * kCandidates + slot;
    const auto entry = static_cast<const typename List::Entry*>(p.ws.candidates)[pair];
    if (entry != 0) visit(pair, pages[List::id(entry, p.id_bits)]);
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(256) count_kernel(const Params p, int num_rows) {
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32;
  if (local >= num_rows) return;
  each_candidate<kCandidates>(p, local, threadIdx.x % 32, [&](int64_t pair, int page) {
    p.ws.place[pair] = atomicAdd(&p.ws.count[page * kCountStride], 1);
  });
}

__global__ void __launch_bounds__(1024) place_kernel(const Params p) {
  __shared__ int scratch[32];
  __shared__ int ends[2];
  const int tid = threadIdx.x;
  int pairs = 0, items = 0;
  for (int base = 0; base < p.num_pages; base += 1024) {
    const int page = base + tid;
    const int count = page < p.num_pages ? p.ws.count[page * kCountStride] : 0;
    const int cuts = (count + kItemPairs - 1) / kItemPairs;
    const int pairs_end = cta_scan_1024(count, scratch), items_end = cta_scan_1024(cuts, scratch);
    const int first = pairs + pairs_end - count;
    if (page < p.num_pages) p.ws.page_begin[page] = first;
    for (int i = 0; i < cuts; ++i) {
      p.ws.rescore_items[items + items_end - cuts + i] = {page, first + i * kItemPairs,
                                                  min(kItemPairs, count - i * kItemPairs)};
    }
    if (tid == 1023) ends[0] = pairs_end, ends[1] = items_end;
    __syncthreads();
    pairs += ends[0];
    items += ends[1];
    __syncthreads();
  }
  if (tid == 0) *p.ws.num_rescore_items = items;
}

template <int kCandidates>
__global__ void __launch_bounds__(256) scatter_kernel(const Params p, int num_rows) {
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32;
  if (local >= num_rows) return;
  each_candidate<kCandidates>(p, local, threadIdx.x % 32, [&](int64_t pair, int page) {
    p.ws.pairs[p.ws.page_begin[page] + p.ws.place[pair]] = static_cast<int32_t>(pair);
  });
}

// --- rescore

constexpr int kRescoreThreads = 128, kRescoreCtas = 4;
constexpr int kHalfPageBytes = kBlock * 128, kPageBytes = 2 * kHalfPageBytes;
constexpr int kRescoreSmemBytes = kPageBytes + 1024;

template <int kCandidates>
__global__ void __launch_bounds__(kRescoreThreads, kRescoreCtas)
    rescore_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const keys = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  __shared__ uint64_t full;
  __shared__ int32_t item_pairs[kItemPairs];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  if (tid == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const uint64_t key_descriptor = descriptor_k_major(keys);
  const uint32_t* queries =
      static_cast<const uint32_t*>(p.qi_TRX) + int64_t{p.first_row} * (kDim / 2) + lane % 4;
  const int num_items = *p.ws.num_rescore_items;
  int phase = 0;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x, phase ^= 1) {
    const RescoreItem item = p.ws.rescore_items[index];
    __syncthreads();  // the last item's keys have been read
    if (tid == 0) {
      mbarrier_arrive_expect_tx(&full, kPageBytes);
      tma_load(keys, &x_map, &full, 0, item.page * kBlock);
      tma_load(keys + kHalfPageBytes, &x_map, &full, 64, item.page * kBlock);
    }
    for (int i = tid; i < kItemPairs; i += kRescoreThreads)
      item_pairs[i] = i < item.count ? p.ws.pairs[item.begin + i] : -1;
    __syncthreads();
    for (int base = 0; base < item.count; base += 64) {
      uint32_t a[kDim / 16][4];
      int pair[2];
      const uint32_t* query[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair[half] = item_pairs[base + 16 * warp + lane / 4 + 8 * half];
        query[half] = queries + int64_t{max(pair[half], 0) / kCandidates} * (kDim / 2);
      }
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = __ldg(query[i % 2] + 8 * k + i / 2 * 4);
      }
      if (base == 0) mbarrier_wait(&full, phase);
      float acc[64];
      wgmma_pin(a);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        wgmma_bf16_rs<0>(acc, a[k],
                         descriptor_advance(key_descriptor, k / 4 * kHalfPageBytes + k % 4 * 32),
                         k == 0 ? 0 : 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(acc);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = fmaxf(acc[2 * half], acc[2 * half + 1]);
#pragma unroll
        for (int j = 4; j < 64; j += 4)
          best = fmaxf(best, fmaxf(acc[j + 2 * half], acc[j + 2 * half + 1]));
        best = fmaxf(best, __shfl_xor_sync(kAll, best, 1));
        best = fmaxf(best, __shfl_xor_sync(kAll, best, 2));
        if (lane % 4 == 0 && pair[half] >= 0) p.ws.score[pair[half]] = msa_canonical_score(best);
      }
    }
  }
}

// --- choose: a warp per row

// No block that is no candidate can have a bf16 score of `last` or more. See index_prefill8.h.
template <int kCandidates>
__device__ __forceinline__ bool is_certified(const Params& p, int local, float last) {
  using List = typename ListOf<kCandidates>::Type;
  const auto worst = static_cast<const typename List::Entry*>(
      p.ws.candidates)[int64_t{local} * kCandidates + kCandidates - 1];
  if (worst == 0) return true;  // every block was a candidate
  return p.ws.query_stat[local].x * List::largest_score(worst, p.id_bits) < last;
}

template <int kCandidates>
__global__ void __launch_bounds__(256) choose_kernel(const Params p, int num_rows) {
  using List = typename ListOf<kCandidates>::Type;
  constexpr bool kRescored = kCandidates >= kTopk;
  constexpr int kPerLane = (kCandidates + 31) / 32;
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (local >= num_rows) return;
  const Row row = row_of(p, local);
  if (!row.mine) return;
  int32_t* ids = p.ids_RTK + (row.group * p.batch.num_queries + row.query) * kTopk;
  if (!row.choice) {
    if (lane < kTopk) ids[lane] = lane <= row.own ? lane : -1;
    return;
  }
  int id[kPerLane], rank[kPerLane], place[kPerLane];
  uint64_t key[kPerLane];  // higher score, then lower id
  float score[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int slot = 32 * i + lane;
    const int64_t at = int64_t{local} * kCandidates + slot;
    typename List::Entry entry = 0;
    if (slot < kCandidates)
      entry = static_cast<const typename List::Entry*>(p.ws.candidates)[at];
    id[i] = entry == 0 ? INT_MAX : List::id(entry, p.id_bits);
    score[i] = kRescored && entry != 0 ? p.ws.score[at] : 0.0f;
    key[i] = entry == 0
                 ? 0
                 : uint64_t{ordered_bits(score[i])} << 32 | (0xffffffffu - static_cast<uint32_t>(id[i]));
    rank[i] = kRescored || entry == 0 ? 0 : slot;
    place[i] = 0;
  }
  if constexpr (kRescored) {
#pragma unroll
    for (int from = 0; from < kCandidates; ++from) {
      const uint64_t other = __shfl_sync(kAll, key[from / 32], from % 32);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) rank[i] += other > key[i] ? 1 : 0;
    }
  }
  bool chosen[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) chosen[i] = key[i] != 0 && rank[i] < kTopk - 1;
#pragma unroll
  for (int from = 0; from < kCandidates; ++from) {
    const int other = __shfl_sync(kAll, chosen[from / 32] ? id[from / 32] : INT_MAX, from % 32);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) place[i] += other < id[i] ? 1 : 0;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (chosen[i]) ids[place[i]] = id[i];
    if constexpr (kRescored) {
      if (p.uncertified != nullptr && chosen[i] && rank[i] == kTopk - 2 &&
          !is_certified<kCandidates>(p, local, score[i])) {
        const int row0 = row.seq.q_begin * p.groups, at = p.first_row + local;
        const int tile0 = row0 + (at - row0) / kTileRows * kTileRows;
        p.ws.tile_flags[tile_number(tile0, row.seq.index)] = 1;
        atomicAdd(p.uncertified, 1);
      }
    }
  }
  if (lane == 0) ids[kTopk - 1] = row.own;
}

// --- host

int id_bits(const MsaBatch& batch) {
  int bits = 13;
  while (batch.max_k_len > int64_t{kBlock} << bits) ++bits;
  return bits;
}

int64_t chunk_rows(const MsaGeometry& g, const MsaBatch& batch) {
  return std::min<int64_t>(batch.num_queries, kChunkQueries) * g.groups;
}

// Upper bound of tile_number.
int64_t num_tiles(const MsaGeometry& g, const MsaBatch& batch) {
  return batch.num_queries * g.groups / kTileRows + batch.num_seqs + 1;
}

Workspace make_workspace(const MsaGeometry& g, const MsaBatch& batch, int64_t num_pages,
                         int candidates, void* base) {
  char* at = static_cast<char*>(base);
  const auto take = [&](auto*& pointer, int64_t bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += align_up(bytes);
  };
  const int64_t rows = chunk_rows(g, batch) + kTileRows,
                entry_bytes = candidates < kTopk ? 8 : 4;
  const int64_t max_lists = Schedule::max_lists(kMaxSms), pairs = rows * candidates;
  Workspace ws;
  take(ws.counters, 64);
  take(ws.items, Schedule::max_items(rows, batch.num_seqs, kMaxSms) * sizeof(ScanItem));
  take(ws.merges, max_lists * sizeof(MergeItem));
  take(ws.lists, max_lists * kTileRows * candidates * entry_bytes);
  take(ws.codes, rows * kDim);
  take(ws.candidates, pairs * entry_bytes);
  ws.end = at;
  if (candidates < kTopk) return ws;
  take(ws.place, pairs * 4);
  take(ws.pairs, pairs * 4);
  take(ws.score, pairs * 4);
  take(ws.count, num_pages * kCountStride * 4);
  take(ws.page_begin, num_pages * 4);
  take(ws.rescore_items,
       (pairs / kItemPairs + std::min(pairs, num_pages) + 1) * sizeof(RescoreItem));
  take(ws.num_rescore_items, 4);
  ws.end = at;
  if (candidates < kExactCandidates) return ws;
  take(ws.query_stat, rows * sizeof(float4));
  take(ws.tile_flags, num_tiles(g, batch) * 4);
  take(ws.bf16, index_select_sm90_workspace_bytes(g, batch));
  ws.end = at;
  return ws;
}

template <int kCandidates>
void run(const IndexPrefill8Params& a, cudaStream_t stream) {
  const int R = a.geometry.groups, sms = std::min(sm_count(), kMaxSms);
  const int64_t total = a.batch.num_queries * R, rows = chunk_rows(a.geometry, a.batch);
  const int buffer_rows = static_cast<int>(rows) + kTileRows;
  Params p;
  p.batch = a.batch;
  p.groups = R;
  p.num_pages = static_cast<int>(a.num_pages);
  p.id_bits = id_bits(a.batch);
  p.qi_TRX = a.qi_TRX;
  p.keys = a.keys;
  p.ids_RTK = a.ids_RTK;
  p.uncertified = a.uncertified;
  p.ws = make_workspace(a.geometry, a.batch, a.num_pages, kCandidates, a.workspace);
  const CUtensorMap query_map =
      tensor_map_create(p.ws.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                        {{kDim, 0, kDim}, {buffer_rows, kDim, kTileRows}}, MapSwizzle::k128Bytes);
  const CUtensorMap key_map = tensor_map_create(
      a.keys.codes_PBX, CU_TENSOR_MAP_DATA_TYPE_UINT8,
      {{kDim, 0, kDim}, {a.num_pages * kBlock, kDim, kBlock}}, MapSwizzle::k128Bytes);
  const auto scan = scan_kernel<kCandidates>;
  M3_CUDA_CHECK(
      cudaFuncSetAttribute(scan, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  if (a.uncertified != nullptr) {
    M3_CUDA_CHECK(cudaMemsetAsync(a.uncertified, 0, 4, stream));
    M3_CUDA_CHECK(
        cudaMemsetAsync(p.ws.tile_flags, 0, num_tiles(a.geometry, a.batch) * 4, stream));
  }
  const unsigned row_ctas = static_cast<unsigned>((buffer_rows + 7) / 8);  // a warp per row
  for (int64_t first = 0; first < total; first += rows) {
    p.first_row = static_cast<int>(first);
    p.end_row = static_cast<int>(std::min(first + rows, total));
    quantise_kernel<<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
    schedule_kernel<<<1, 1024, 0, stream>>>(a.batch, R, kTopk, sms, p.first_row, p.end_row,
                                              nullptr, p.ws);
    launch_dependent(scan, sms, kScanThreads, kSmemBytes, stream, query_map, key_map, p);
    launch_dependent(merge_kernel<kCandidates>, sms * 4, 32 * kMergeWarps, 0, stream, p);
    if constexpr (kCandidates >= kTopk) {
      const CUtensorMap x_map = tensor_map_create(
          a.x_PBX, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
          {{kDim, 0, 64}, {a.num_pages * kBlock, kDim * 2, kBlock}}, MapSwizzle::k128Bytes);
      const auto rescore = rescore_kernel<kCandidates>;
      M3_CUDA_CHECK(cudaFuncSetAttribute(rescore, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kRescoreSmemBytes));
      M3_CUDA_CHECK(
          cudaMemsetAsync(p.ws.count, 0, a.num_pages * kCountStride * 4, stream));
      count_kernel<kCandidates><<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
      place_kernel<<<1, 1024, 0, stream>>>(p);
      scatter_kernel<kCandidates><<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
      rescore<<<sms * kRescoreCtas, kRescoreThreads, kRescoreSmemBytes, stream>>>(x_map, p);
    }
    choose_kernel<kCandidates><<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
  }
  M3_CUDA_CHECK(cudaGetLastError());
  if (a.uncertified == nullptr) return;
  index_select_sm90({.geometry = a.geometry,
                     .batch = a.batch,
                     .qi_TRX = a.qi_TRX,
                     .ki = a.x_PBX,
                     .num_pages = a.num_pages,
                     .ids_RTK = a.ids_RTK,
                     .tile_flags = p.ws.tile_flags,
                     .workspace = p.ws.bf16},
                    Stream{stream});
}

}  // namespace

std::string index_prefill8_supports(const MsaGeometry& g, const MsaBatch& batch, int candidates) {
  if (g.index_dim != kDim || g.block != kBlock || g.topk != kTopk || g.local != 1 || g.init != 0)
    return "want index dim 128, blocks of 128, topk 16, one local block and no initial one";
  if (batch.layout != KvLayout::kPaged) return "want paged keys";
  if (candidates != 15 && candidates != 24 && candidates != 32 && candidates != kExactCandidates)
    return "want 15, 24, 32 or 64 candidates, got " + std::to_string(candidates);
  if (batch.num_queries * g.groups > INT_MAX / 2 || batch.max_k_len > int64_t{kBlock} << kMaxIdBits)
    return "too many query rows or keys";
  return {};
}

int64_t index_prefill8_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch,
                                       int64_t num_pages, int candidates) {
  return static_cast<char*>(make_workspace(geometry, batch, num_pages, candidates, nullptr).end) -
         static_cast<char*>(nullptr);
}

void index_prefill8(const IndexPrefill8Params& params, Stream stream) {
  const std::string reason =
      index_prefill8_supports(params.geometry, params.batch, params.candidates);
  M3_CHECK(reason.empty(), "index_select with 8-bit keys: {}", reason);
  M3_CHECK(params.keys.scale_P != nullptr,
           "index_select with 8-bit keys: they need scale_P [P], one scale per page");
  M3_CHECK(params.uncertified == nullptr ||
               (params.candidates == kExactCandidates && params.keys.error_P != nullptr &&
                params.keys.norm_P != nullptr),
           "index_select with 8-bit keys: certificates need {} candidates, error_P and norm_P, got "
           "{} candidates",
           kExactCandidates, params.candidates);
  if (params.batch.num_queries == 0) return;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  switch (params.candidates) {
    case 15:
      return run<15>(params, handle);
    case 24:
      return run<24>(params, handle);
    case 32:
      return run<32>(params, handle);
    default:
      return run<kExactCandidates>(params, handle);
  }
}

}  // namespace m3
