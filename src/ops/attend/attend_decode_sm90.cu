// Decode attention over selected blocks or all keys (hopper.md §6.6).
//
// Work item: (sequence, up to four query tokens, group). A cluster of 1..16 CTAs shares an item: its
// list of blocks, cut into stages of 64 keys, is dealt out in contiguous parts.
//   warp 4      producer: one tensor copy of 16 KB for K and one for V a stage, 128-byte swizzled
//   warps 0-3   mma.sync m16n8k16 with the 16 heads of a group as M and keys as N, so that S = Q K^T
//               leaves P in the registers where P V wants it. One token: warp w takes keys 16w..16w+15
//               of a stage. Two tokens: two warps each. Three or four: one warp each, over all 64 keys;
//               a warp skips blocks that its token did not select. Online softmax per warp.
// Before: threads 0-127 choose the blocks from the index scores, or unite the tokens' lists.
// After: warps of a token, then CTAs of the cluster (distributed shared memory) are merged in order, the
// rows of the result dealt over the cluster.
// Fragments of Q and K take the 16-byte chunks 2t, 2t+1 (+ 8) of a row in lane t of a quad, in one order
// for both; with the swizzle that is free of bank conflicts and Q needs no shared memory.
//
// Shared memory: ring 32 KB x stages (before: scratch of the choice; after: 33 KB of partials), lists,
// barriers. FLOP: 4*16*128*128 a block and token; bytes: 64 KB a block: bound by memory or, for small
// batches, by latency. Two CTAs share an SM, so that one streams while the other chooses or merges.
#include <algorithm>

#include "hopper/cluster.cuh"
#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "ops/attend/attend_decode.h"
#include "ops/index_select/select_blocks.cuh"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

using namespace hopper;

constexpr int kBlock = 128, kDim = 128, kHeads = 16;
constexpr int kStageKeys = 64;
constexpr int kTileBytes = kStageKeys * kDim * 2;  // K or V of a stage: [2 halves of D][64 keys][64], swizzled
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kHalfBytes = kTileBytes / 2;
constexpr int kMaxStages = 6;
constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kTokens = 4;  // query tokens of an item
constexpr int kMaxEntries = kTokens * kSelectMaxTopk;
constexpr int kPartialStride = kDim + 4;  // floats; rows of neighbouring quads on different banks
constexpr float kLn2 = 0.693147180559945f;

struct Entry {
  int block;
  int page;
  int tokens;  // bit per token of the item that reads it
};

struct Shared {
  uint64_t full_k[kMaxStages], full_v[kMaxStages], empty[kMaxStages];
  Entry entries[kMaxEntries];
  int num_entries;
  int32_t ids[kMaxEntries];
  uint8_t first[kMaxEntries];
  float2 warp_stat[4][kHeads];        // running maximum (log2 units) and sum of a warp's part
  float2 token_stat[kTokens][kHeads];  // of the CTA's part
  SelectShared select;
};

// Where an item lies; the same in all threads of a cluster.
struct Item {
  int sequence, group, first_row, num_tokens, length, position;  // position of the first token
};

__device__ __forceinline__ int position_of(const Item& item, int token) { return item.position + token; }

struct Range {
  int begin, end;
};

// --- the list of blocks

// One token, from its scores. Threads 0..127.
__device__ __forceinline__ void choose_blocks(const AttendDecodeParams& p, const Item& item, bool write_ids,
                                              uint8_t* scratch, Shared& shared) {
  const int thread = threadIdx.x;
  const int own = item.position < 0 ? -1 : item.position / kBlock;
  const int wanted = min(p.topk - 1, own);
  if (wanted > 0 && own > p.topk - 1) {
    const float* scores = p.scores_TRM + (int64_t{item.first_row} * p.groups + item.group) * p.score_stride;
    select_blocks(scores, own, wanted, scratch, shared.select, shared.ids, thread,
                  [] { named_barrier_sync(1, kConsumers); });
  } else if (thread < wanted) {
    shared.ids[thread] = thread;
  }
  if (thread <= wanted) {
    const int block = thread == wanted ? own : shared.ids[thread];
    if (block >= 0) shared.entries[thread] = {block, p.page_table[item.sequence * p.page_stride + block], 1};
  }
  if (thread == 0) shared.num_entries = own < 0 ? 0 : wanted + 1;
  if (write_ids && thread < p.topk) {
    const int id = thread < wanted ? shared.ids[thread] : thread == wanted ? own : -1;
    p.ids_RTK[(int64_t{item.group} * p.num_queries + item.first_row) * p.topk + thread] = id;
  }
}

// The union of the tokens' lists, ascending. Threads 0..127; at most one entry per thread.
__device__ __forceinline__ void unite_blocks(const AttendDecodeParams& p, const Item& item, Shared& shared) {
  const int thread = threadIdx.x, count = item.num_tokens * p.topk;
  int own = -1;
  if (thread < count) {
    const int token = thread / p.topk;
    const int64_t row = int64_t{item.group} * p.num_queries + item.first_row + token;
    if (position_of(item, token) >= 0) own = p.ids_RTK[row * p.topk + thread % p.topk];
    shared.ids[thread] = own;
  }
  named_barrier_sync(1, kConsumers);
  bool first = own >= 0;
  int tokens = 0;
  if (thread < count && own >= 0) {
    for (int i = 0; i < count; ++i) {
      if (shared.ids[i] != own) continue;
      tokens |= 1 << (i / p.topk);
      if (i < thread) first = false;
    }
  }
  if (thread < count) shared.first[thread] = first ? 1 : 0;
  const int num_first = __popc(__ballot_sync(0xffffffffu, thread < count && first));
  if (thread == 0) shared.num_entries = 0;
  named_barrier_sync(1, kConsumers);
  if (thread % 32 == 0) atomicAdd(&shared.num_entries, num_first);
  if (thread < count && first) {
    int place = 0;
    for (int i = 0; i < count; ++i) place += shared.first[i] != 0 && shared.ids[i] < own ? 1 : 0;
    shared.entries[place] = {own, p.page_table[item.sequence * p.page_stride + own], tokens};
  }
}

// --- copies

__device__ __forceinline__ void produce(const AttendDecodeParams& p, const CUtensorMap* k_map,
                                        const CUtensorMap* v_map, const Item& item, Range range, bool all_keys,
                                        int stages, uint8_t* ring, Shared& shared) {
  const int lane = threadIdx.x % 32;
  const int32_t* pages = p.page_table + item.sequence * p.page_stride;
  const auto page_at = [&](int at) {
    return at >= range.end ? 0 : all_keys ? pages[at / 2] : shared.entries[at / 2].page;
  };
  int stage = 0, round = 0;
  int next_page = page_at(range.begin + lane);
  for (int base = range.begin; base < range.end; base += 32) {
    const int page = next_page;
    next_page = page_at(base + 32 + lane);
    const int count = min(32, range.end - base);
    for (int i = 0; i < count; ++i) {
      const int row = (__shfl_sync(0xffffffffu, page, i) * p.groups + item.group) * kBlock + (base + i) % 2 * kStageKeys;
      if (lane == 0) {
        if (round > 0) mbarrier_wait(&shared.empty[stage], (round - 1) & 1);
        uint8_t* tile = ring + stage * kStageBytes;
        mbarrier_arrive_expect_tx(&shared.full_k[stage], kTileBytes);
        tma_load(tile, k_map, &shared.full_k[stage], 0, row, 0);
        mbarrier_arrive_expect_tx(&shared.full_v[stage], kTileBytes);
        tma_load(tile + kTileBytes, v_map, &shared.full_v[stage], 0, row, 0);
      }
      if (++stage == stages) stage = 0, ++round;
    }
  }
}

// --- one warp's attention

struct WarpState {
  float o[16][4];             // heads g, g+8; dims 8j + 2t and the next
  float maximum[2], sum[2];   // of heads g, g+8; log2 units; the sum is this lane's share
};

__device__ __forceinline__ void load_query(const AttendDecodeParams& p, const Item& item, int token,
                                           uint32_t (&query)[4][8]) {
  const int lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
  const int64_t heads = int64_t{p.groups} * p.heads_per_group;
  const uint4* rows = static_cast<const uint4*>(p.q_THD) +
                      ((item.first_row + token) * heads + int64_t{item.group} * p.heads_per_group) * (kDim / 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int chunk = 8 * (i / 2) + 2 * t + i % 2;
    const uint4 none = {0, 0, 0, 0};
    const uint4 a = quad < p.heads_per_group ? rows[quad * (kDim / 8) + chunk] : none;
    const uint4 b = quad + 8 < p.heads_per_group ? rows[(quad + 8) * (kDim / 8) + chunk] : none;
    query[i][0] = a.x, query[i][1] = b.x, query[i][2] = a.y, query[i][3] = b.y;
    query[i][4] = a.z, query[i][5] = b.z, query[i][6] = a.w, query[i][7] = b.w;
  }
}

// Logits of 16 keys, in log2 units: s[n][..] are keys 8n + 2t, +1 of heads g (0, 1) and g+8 (2, 3).
// last: the last visible key, relative to the first of the 16.
__device__ __forceinline__ void logits(const uint8_t* k_tile, int key0, const uint32_t (&query)[4][8], float scale,
                                       int last, float (&s)[2][4]) {
  const int lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint8_t* row = k_tile + (key0 + 8 * n + quad) * 128;
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 k = *reinterpret_cast<const uint4*>(row + i / 2 * kHalfBytes + (((2 * t + i % 2) ^ quad) * 16));
      mma_m16n8k16_bf16(s[n], {query[i][0], query[i][1], query[i][2], query[i][3]}, {k.x, k.y});
      mma_m16n8k16_bf16(s[n], {query[i][4], query[i][5], query[i][6], query[i][7]}, {k.z, k.w});
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 8 * n + 2 * t + e % 2 <= last ? s[n][e] * scale : -INFINITY;
  }
}

// New maxima and sums; returns P as the A operand of the product with V.
__device__ __forceinline__ void softmax_step(WarpState& state, float (&s)[2][4], uint32_t (&prob)[4]) {
  float next[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    next[h] = fmaxf(state.maximum[h], top);
  }
  if (__any_sync(0xffffffffu, next[0] > state.maximum[0] || next[1] > state.maximum[1])) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // -inf - -inf: nothing has been summed yet, any factor will do
      const float factor = state.maximum[h] == -INFINITY ? 0.0f : exp2_approx(state.maximum[h] - next[h]);
      state.maximum[h] = next[h];
      state.sum[h] *= factor;
#pragma unroll
      for (int j = 0; j < 16; ++j) state.o[j][2 * h] *= factor, state.o[j][2 * h + 1] *= factor;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float base = state.maximum[h] == -INFINITY ? 0.0f : state.maximum[h];
    float total = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float low = exp2_approx(s[n][2 * h] - base), high = exp2_approx(s[n][2 * h + 1] - base);
      total += low + high;
      prob[2 * n + h] = pack_bf16x2(low, high);
    }
    state.sum[h] += total;
  }
}

// o += P V for 16 keys. Values of keys behind `last` are cleared: P is 0 there, but 0 x NaN is not.
__device__ __forceinline__ void add_values(const uint8_t* v_tile, int key0, const uint32_t (&prob)[4], int last,
                                           WarpState& state) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int key = key0 + lane % 16, chunk_half = lane / 16;
  const uint8_t* row = v_tile + key * 128;
  uint32_t keep[2] = {0xffffffffu, 0xffffffffu};
  if (last < 15) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int first = 8 * n + 2 * t;
      keep[n] = (first <= last ? 0x0000ffffu : 0) | (first + 1 <= last ? 0xffff0000u : 0);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t v[4];
    const int chunk = 2 * j % 8 + chunk_half;
    ldmatrix_x4_transposed(v, row + j / 4 * kHalfBytes + ((chunk ^ (key & 7)) * 16));
    mma_m16n8k16_bf16(state.o[2 * j], prob, {v[0] & keep[0], v[1] & keep[1]});
    mma_m16n8k16_bf16(state.o[2 * j + 1], prob, {v[2] & keep[0], v[3] & keep[1]});
  }
}

__device__ __forceinline__ void consume(const AttendDecodeParams& p, const Item& item, Range range, bool all_keys,
                                        int stages, const uint8_t* ring, Shared& shared, int token, int first_key,
                                        int num_keys, const uint32_t (&query)[4][8], WarpState& state) {
  const int position = position_of(item, token);
  int stage = 0, round = 0;
  for (int at = range.begin; at < range.end; ++at) {
    const int block = all_keys ? at / 2 : shared.entries[at / 2].block;
    const bool wanted = all_keys || (shared.entries[at / 2].tokens >> token & 1) != 0;
    const int last = position - (block * kBlock + at % 2 * kStageKeys) - first_key;  // of this warp's keys
    const uint8_t* tile = ring + stage * kStageBytes;
    mbarrier_wait(&shared.full_k[stage], round & 1);
    for (int key = 0; key < num_keys && wanted && key <= last; key += 16) {
      float s[2][4];
      uint32_t prob[4];
      logits(tile, first_key + key, query, p.scale_log2, last - key, s);
      softmax_step(state, s, prob);
      if (key == 0) mbarrier_wait(&shared.full_v[stage], round & 1);
      add_values(tile + kTileBytes, first_key + key, prob, last - key, state);
    }
    mbarrier_wait(&shared.full_v[stage], round & 1);  // also where the warp had nothing to do
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[stage]);
    if (++stage == stages) stage = 0, ++round;
  }
}

// --- merging

__device__ __forceinline__ void store_partial(const WarpState& state, float* partial, float2* stat) {
  const int lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = state.sum[h];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (t == 0) stat[quad + 8 * h] = {state.maximum[h], sum};
    float* row = partial + (quad + 8 * h) * kPartialStride + 2 * t;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      *reinterpret_cast<float2*>(row + 8 * j) = {state.o[j][2 * h], state.o[j][2 * h + 1]};
    }
  }
}

// Weight of a part with maximum m where the whole has maximum `top`; 0 for a part without keys.
__device__ __forceinline__ float part_weight(float m, float top) { return m == -INFINITY ? 0.0f : exp2_approx(m - top); }

// The warps of each token into the first of them. Threads 0..127.
__device__ __forceinline__ void merge_warps(int num_tokens, int warps_per_token, float* partial, Shared& shared) {
  for (int i = threadIdx.x; i < num_tokens * kHeads * (kDim / 4); i += kConsumers) {
    const int token = i / (kHeads * (kDim / 4)), head = i / (kDim / 4) % kHeads, quarter = i % (kDim / 4);
    const int warp = token * warps_per_token;
    float top = -INFINITY, sum = 0;
    for (int w = 0; w < warps_per_token; ++w) top = fmaxf(top, shared.warp_stat[warp + w][head].x);
    float4 total = {0, 0, 0, 0};
    float* at = partial + (warp * kHeads + head) * kPartialStride + 4 * quarter;
    for (int w = 0; w < warps_per_token; ++w) {
      const float2 stat = shared.warp_stat[warp + w][head];
      const float weight = part_weight(stat.x, top);
      const float4 part = *reinterpret_cast<const float4*>(at + w * kHeads * kPartialStride);
      sum += weight * stat.y;
      total.x += weight * part.x, total.y += weight * part.y, total.z += weight * part.z, total.w += weight * part.w;
    }
    *reinterpret_cast<float4*>(at) = total;
    if (quarter == 0) shared.token_stat[token][head] = {top, sum};
  }
}

// Unnormalised row with its maximum (log2 units) and sum: the result, or one split's part of it.
__device__ __forceinline__ void write_row(const AttendDecodeParams& p, int64_t row, float top, float sum, float4 total,
                                          int split, int splits) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = p.num_queries * p.groups * p.heads_per_group;
  if (splits > 1) {
    reinterpret_cast<float4*>(p.partial)[(split * rows + row) * (kDim / 4) + lane] = total;
    if (lane == 0) reinterpret_cast<float2*>(p.partial + int64_t{splits} * rows * kDim)[split * rows + row] = {top, sum};
    return;
  }
  const float scale = sum == 0 ? 0.0f : 1.0f / sum;
  const uint2 packed = {pack_bf16x2(total.x * scale, total.y * scale), pack_bf16x2(total.z * scale, total.w * scale)};
  static_cast<uint2*>(p.o_THD)[row * (kDim / 4) + lane] = packed;
  if (lane == 0 && p.lse_TH != nullptr) p.lse_TH[row] = sum == 0 ? -INFINITY : kLn2 * (top + log2f(sum));
}

// The CTAs of the cluster in rank order; rows are dealt over all warps of the cluster.
__device__ __forceinline__ void merge_cluster(const AttendDecodeParams& p, const Item& item, int rank, int cluster,
                                              int warps_per_token, const float* partial, const Shared& shared,
                                              int split, int splits) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = item.num_tokens * p.heads_per_group;
  for (int i = warp * cluster + rank; i < rows; i += kThreads / 32 * cluster) {
    const int token = i / p.heads_per_group, head = i % p.heads_per_group;
    float2 stat = {-INFINITY, 0};
    if (lane < cluster) {
      stat = cluster_load_f32x2(cluster_address(&shared.token_stat[token][head], static_cast<uint32_t>(lane)));
    }
    float top = stat.x;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float weight = part_weight(stat.x, top);
    float sum = weight * stat.y;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    float4 total = {0, 0, 0, 0};
    const float* at = partial + (token * warps_per_token * kHeads + head) * kPartialStride + 4 * lane;
#pragma unroll 4
    for (int c = 0; c < cluster; ++c) {
      const float4 part = cluster_load_f32x4(cluster_address(at, static_cast<uint32_t>(c)));
      const float w = __shfl_sync(0xffffffffu, weight, c);
      total.x += w * part.x, total.y += w * part.y, total.z += w * part.z, total.w += w * part.w;
    }
    const int64_t row = (int64_t{item.first_row} + token) * p.groups * p.heads_per_group +
                        item.group * p.heads_per_group + head;
    write_row(p, row, top, sum, total, split, splits);
  }
}

// --- the kernel

__global__ __launch_bounds__(kThreads, 2) void attend_decode_kernel(const AttendDecodeParams p,
                                                                    const __grid_constant__ CUtensorMap k_map,
                                                                    const __grid_constant__ CUtensorMap v_map,
                                                                    int tiles, int cluster, int splits, int stages) {
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* ring = smem;
  Shared& shared = *reinterpret_cast<Shared*>(smem + stages * kStageBytes);
  const int rank = static_cast<int>(cluster_cta_rank()), warp = threadIdx.x / 32;

  int at = blockIdx.x / cluster;
  const int split = at % splits;
  at /= splits;
  const int tile = at % tiles;
  at /= tiles;
  Item item;
  item.group = at % p.groups;
  item.sequence = at / p.groups;
  const int first_row = p.cu_q[item.sequence], queries = p.cu_q[item.sequence + 1] - first_row;
  item.length = p.seq_lens[item.sequence];
  item.first_row = first_row + tile * kTokens;
  item.num_tokens = min(kTokens, queries - tile * kTokens);
  item.position = item.length - queries + tile * kTokens;
  if (item.num_tokens <= 0) return;  // the whole cluster
  const int last_position = item.position + item.num_tokens - 1;

  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(&shared.full_k[i], 1);
      mbarrier_init(&shared.full_v[i], 1);
      mbarrier_init(&shared.empty[i], kConsumers / 32);
    }
    mbarrier_init_fence();
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
  }
  const int warps_per_token = item.num_tokens == 1 ? 4 : item.num_tokens == 2 ? 2 : 1;
  const int token = min(warp / warps_per_token, kTokens - 1);
  const bool consumer = warp < kConsumers / 32;
  const bool all_keys = p.scores_TRM == nullptr && p.ids_RTK == nullptr;

  grid_dependency_wait();
  grid_dependency_launch();
  uint32_t query[4][8] = {};
  if (consumer) {
    if (token < item.num_tokens) load_query(p, item, token, query);
    if (p.scores_TRM != nullptr) {
      choose_blocks(p, item, rank == 0 && split == 0 && p.ids_RTK != nullptr, ring, shared);
    } else if (!all_keys) {
      unite_blocks(p, item, shared);
    }
  }
  // The scratch of the choice was written by ordinary stores; the copy engine writes there next.
  fence_async_shared();
  __syncthreads();

  int total = 0;
  if (last_position >= 0) {
    if (all_keys) {
      total = last_position / kStageKeys + 1;
    } else if (shared.num_entries > 0) {
      const int last_block = shared.entries[shared.num_entries - 1].block;
      total = 2 * shared.num_entries - (last_block * kBlock + kStageKeys > last_position ? 1 : 0);
    }
  }
  const int64_t part = int64_t{split} * cluster + rank, parts = int64_t{splits} * cluster;
  const Range range = {static_cast<int>(total * part / parts), static_cast<int>(total * (part + 1) / parts)};

  WarpState state = {};
  state.maximum[0] = state.maximum[1] = -INFINITY;
  if (!consumer) {
    produce(p, &k_map, &v_map, item, range, all_keys, stages, ring, shared);
  } else {
    // A warp without a token (of three) follows the barriers only.
    const int num_keys = token < item.num_tokens ? kStageKeys / warps_per_token : 0;
    consume(p, item, range, all_keys, stages, ring, shared, token, warp % warps_per_token * num_keys, num_keys, query,
            state);
  }
  __syncthreads();  // every copy has landed and been read: the ring is free
  float* partial = reinterpret_cast<float*>(ring);
  if (consumer) store_partial(state, partial + warp * kHeads * kPartialStride, shared.warp_stat[warp]);
  __syncthreads();
  if (consumer) merge_warps(item.num_tokens, warps_per_token, partial, shared);
  cluster_arrive();
  cluster_wait();
  merge_cluster(p, item, rank, cluster, warps_per_token, partial, shared, split, splits);
  cluster_arrive();  // nobody leaves while others read its shared memory
  cluster_wait();
}

// The splits of a row in order; one warp per row.
__global__ __launch_bounds__(128) void attend_decode_merge_kernel(const AttendDecodeParams p, int splits) {
  const int64_t rows = p.num_queries * p.groups * p.heads_per_group;
  const int64_t row = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_dependency_wait();
  if (row >= rows) return;
  const float4* parts = reinterpret_cast<const float4*>(p.partial);
  const float2* stats = reinterpret_cast<const float2*>(p.partial + splits * rows * kDim);
  float top = -INFINITY, sum = 0;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, __ldcg(&stats[s * rows + row]).x);
  float4 total = {0, 0, 0, 0};
#pragma unroll 4
  for (int s = 0; s < splits; ++s) {
    const float2 stat = __ldcg(&stats[s * rows + row]);
    const float weight = part_weight(stat.x, top);
    const float4 part = __ldcg(&parts[(s * rows + row) * (kDim / 4) + lane]);
    sum += weight * stat.y;
    total.x += weight * part.x, total.y += weight * part.y, total.z += weight * part.z, total.w += weight * part.w;
  }
  write_row(p, row, top, sum, total, 0, 1);
}

CUtensorMap cache_map(const void* pages, int64_t num_pages, int groups) {
  return tensor_map_create(pages, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           {{kDim / 2, 2, kDim / 2},
                            {num_pages * groups * kBlock, kDim * 2, kStageKeys},
                            {2, kDim, 2}},
                           MapSwizzle::k128Bytes);
}

}  // namespace

std::string attend_decode_supports(const MsaGeometry& g, int64_t max_q_len, int64_t max_blocks) {
  if (g.head_dim != kDim) return fmt::format("head_dim {} (wants {})", g.head_dim, kDim);
  if (g.block != kBlock) return fmt::format("block {} (wants {})", g.block, kBlock);
  if (g.heads_per_group > kHeads) return fmt::format("heads_per_group {} (wants at most {})", g.heads_per_group, kHeads);
  if (g.topk > kSelectMaxTopk) return fmt::format("topk {} (wants at most {})", g.topk, kSelectMaxTopk);
  if (max_q_len > 16) return fmt::format("{} query tokens of a sequence (wants at most 16)", max_q_len);
  if (max_blocks > int64_t{1} << 24) return fmt::format("{} blocks (wants at most 2^24)", max_blocks);
  return "";
}

bool attend_decode_chooses(const MsaGeometry& g, int64_t max_q_len, int64_t max_blocks) {
  return max_q_len == 1 && select_scratch_bytes(max_blocks, g.topk) <= 3 * kStageBytes;
}

AttendDecodeTuning attend_decode_tuning(const MsaGeometry& g, int num_seqs, int64_t max_q_len, int64_t max_k_len,
                                        bool full) {
  // Two CTAs on each of 132 SMs is what keeps the memory busy; a cluster cannot be cut finer than the
  // stages of an item.
  constexpr int64_t kTarget = 264;
  const int64_t items = std::max<int64_t>(1, int64_t{num_seqs} * g.groups * ((max_q_len + kTokens - 1) / kTokens));
  AttendDecodeTuning tuning;
  while (tuning.cluster < 16 && items * tuning.cluster < kTarget) tuning.cluster *= 2;
  if (full) {
    const int64_t stages = std::max<int64_t>(1, max_k_len / kStageKeys);
    tuning.cluster = std::min(tuning.cluster, 8);
    tuning.splits = static_cast<int>(std::clamp<int64_t>(kTarget / (items * tuning.cluster), 1,
                                                         std::max<int64_t>(1, stages / (4 * tuning.cluster))));
  }
  return tuning;
}

int64_t attend_decode_workspace_bytes(const MsaGeometry& g, int64_t num_queries, int splits) {
  return splits > 1 ? num_queries * g.heads() * splits * (kDim + 2) * 4 : 0;
}

void attend_decode(const AttendDecodeParams& params, int64_t max_q_len, const AttendDecodeTuning& tuning,
                   Stream stream) {
  if (params.num_seqs == 0 || params.num_queries == 0) return;
  M3_CHECK(tuning.stages >= 2 && tuning.stages <= kMaxStages, "decode attention: {} stages, want 2 to {}",
           tuning.stages, kMaxStages);
  M3_CHECK(params.scores_TRM == nullptr || max_q_len == 1,
           "decode attention: {} query tokens per sequence; blocks are chosen from scores for one token only, pass ids",
           max_q_len);
  M3_CHECK(params.scores_TRM == nullptr ||
               select_scratch_bytes(params.score_stride, params.topk) <= int64_t{tuning.stages} * kStageBytes,
           "decode attention: the choice among {} blocks for topk {} needs more than {} stages; pass ids",
           params.score_stride, params.topk, tuning.stages);
  M3_CHECK(tuning.splits == 1 || params.partial != nullptr, "decode attention: {} splits need a workspace",
           tuning.splits);
  const int64_t bytes = int64_t{tuning.stages} * kStageBytes + static_cast<int64_t>(sizeof(Shared));
  const auto kernel = attend_decode_kernel;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  const int tiles = static_cast<int>((max_q_len + kTokens - 1) / kTokens);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(tuning.cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(int64_t{params.num_seqs} * tiles * params.groups * tuning.splits *
                                              tuning.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = attributes;
  config.numAttrs = tuning.dependent ? 2 : 1;
  const CUtensorMap k_map = cache_map(params.k_PRBD, params.num_pages, params.groups);
  const CUtensorMap v_map = cache_map(params.v_PRBD, params.num_pages, params.groups);
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params, k_map, v_map, tiles, tuning.cluster, tuning.splits,
                                   tuning.stages));
  if (tuning.splits > 1) {
    const int64_t rows = params.num_queries * params.groups * params.heads_per_group;
    config.gridDim = dim3(static_cast<unsigned>((rows + 3) / 4));
    config.blockDim = dim3(128);
    config.dynamicSmemBytes = 0;
    config.attrs = &attributes[1];
    config.numAttrs = 1;
    M3_CUDA_CHECK(cudaLaunchKernelEx(&config, attend_decode_merge_kernel, params, tuning.splits));
  }
}

}  // namespace m3
