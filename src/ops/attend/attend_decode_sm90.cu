// Decode attention over selected blocks or all keys (hopper.md §6.6).
//
// Work item: (sequence, one or up to four query tokens, group). A cluster of 1..16 CTAs shares an
// item: its list of blocks is dealt out in contiguous parts.
//   K and V tiles of a block (128 keys, 32 KB) come in turn through one ring, one tensor copy each,
//   128-byte swizzled. Thread 0 issues them; the barriers of the softmax tell when a tile is free.
//   S = Q K^T: warp w of 8 takes keys 16w..16w+15, the 16 heads of the group are M of mma.sync
//   m16n8k16; row maxima meet in shared memory, P goes there as bf16. O += P V: warp w takes dims
//   16w..16w+15 over all keys. So no warp holds another's part of a row, and nothing has to be
//   merged inside a CTA. Tokens that did not select a block skip it.
// Before: the CTA chooses the blocks from the index scores, or unites the tokens' lists.
// After: every CTA sends its (maximum, sum, O) of each row straight into the shared memory of the
// CTA that owns the row; one cluster barrier; owners merge in rank order. Fragments of Q and K take
// the 16-byte chunks 2t, 2t+1 (+ 8) of a row in lane t of a quad, in one order for both: with the
// swizzle that is free of bank conflicts, and Q needs no shared memory.
//
// Shared memory: ring of 3 or 4 tiles (before: scratch of the choice), P 4.3 KB and parts 8 KB a
// token, statistics, lists. FLOP: 4*16*128*128 a block and token; bytes: 64 KB a block: bound by
// memory or, for small batches, by latency: after the choice each stage is a short chain of a few
// hundred cycles. Queries, keys, values and scores are read after the wait for the kernel before;
// lengths, cu_q and page tables, inputs of the whole step, before it.
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
constexpr int kTileBytes =
    kBlock * kDim * 2;  // K or V of a block: [2 halves of D][128 keys][64], swizzled
constexpr int kHalfBytes = kTileBytes / 2;
constexpr int kMaxTiles = 6;
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kProbStride = kBlock * 2 + 16;  // bytes; rows on different banks
constexpr int kMaxTokens = 4;
constexpr int64_t kMaxBlocks = int64_t{1} << 18,
                  kMaxParts = 4096;  // their product stays in 32 bits
constexpr float kLn2 = 0.693147180559945f;
static_assert(kThreads == kSelectThreads);

struct Entry {
  int block;
  int page;
  int tokens;  // bit per token of the item that reads it
};

template <int kTokens>
struct alignas(16) Shared {
  float part[kTokens * kHeads]
            [kDim];  // rows owned by this CTA, [row of the CTA][rank of the sender]
  float2 part_stat[kTokens * kHeads];  // their maximum (log2 units) and sum
  union {
    uint8_t probabilities[kTokens][kHeads][kProbStride];
    int32_t pages[kTokens * kHeads * kProbStride / 4];  // before: the beginning of the page table
  };
  float warp_max[kTokens][kHeads][kWarps];
  float warp_sum[kTokens][kHeads][kWarps];
  uint4 query[kTokens][8][kTokens == 1 ? 1 : 32];  // fragments, where registers do not hold them
  SelectShared<kSelectMaxTopk> select;
  uint64_t full[kMaxTiles];
  Entry entries[kTokens * kSelectMaxTopk];
  int4 ids[kTokens][kSelectMaxTopk / 4];  // padded with INT_MAX
  int num_entries;
};

// Two CTAs for one token share an SM, or one of them and one CTA of the index kernel (which takes a
// little over half of the 228 KB): so the choice begins the moment the last scores are written.
static_assert(3 * kTileBytes + sizeof(Shared<1>) + 1024 <= 228 * 1024 / 2 - 16);

// What a cluster works on.
struct Item {
  int sequence, group, first_row, num_tokens;
  int position;  // of the first token; negative in unused slots
  bool all_keys;
};

struct Range {
  int begin, end;  // of the item's blocks
};

// First of `total` blocks that part `part` of `parts` takes; 32-bit: one division, no long one.
__device__ __forceinline__ int part_begin(int total, int part, int parts) {
  return static_cast<int>(static_cast<uint32_t>(total) * static_cast<uint32_t>(part) /
                          static_cast<uint32_t>(parts));
}

// --- the list of blocks

// Before the wait for the scores: the page table of contexts up to 139K tokens into shared memory,
// so that pages follow from a choice at once.
__device__ __forceinline__ const int32_t* fetch_pages(const AttendDecodeParams& p, const Item& item,
                                                      Shared<1>& shared) {
  constexpr int kPages = sizeof(shared.pages) / 4;
  const int32_t* pages = p.page_table + item.sequence * p.page_stride;
  const int own = item.position < 0 || item.num_tokens <= 0 ? -1 : item.position / kBlock;
  if (own >= kPages) return pages;
#pragma unroll
  for (int i = 0; i < (kPages + kThreads - 1) / kThreads; ++i) {
    const int block = i * kThreads + static_cast<int>(threadIdx.x);
    if (block <= own) shared.pages[block] = pages[block];
  }
  return shared.pages;
}

// One token, from its scores; `pages` of fetch_pages. Returns whether the scratch was written.
__device__ __forceinline__ bool choose_blocks(const AttendDecodeParams& p, const Item& item,
                                              const int32_t* pages, int rank, int cluster,
                                              bool write_ids, uint8_t* scratch, Shared<1>& shared) {
  const int thread = threadIdx.x;
  const int own = item.position < 0 ? -1 : item.position / kBlock;
  const int wanted = min(p.topk - 1, own);
  int32_t* ids = p.ids_RTK + (int64_t{item.group} * p.num_queries + item.first_row) * p.topk;
  bool used_scratch = false;
  const auto emit = [&](int place, int block, int page) {
    shared.entries[place] = {block, page, 1};
    if (write_ids) ids[place] = block;
  };
  if (thread == 32 && own >= 0) shared.entries[wanted] = {own, pages[own], 1};
  if (wanted > 0 && own > wanted) {
    const float* scores =
        p.scores_TRM + (int64_t{item.first_row} * p.groups + item.group) * p.score_stride;
    // Where a cluster is wide, keys and values of the candidates start towards L2 while ranks are
    // counted: a few blocks in vain, but the latency of memory is half hidden.
    const auto hint = [&](int block) {
      if (cluster < 8 || block % cluster != rank) return;
      const int64_t offset = (int64_t{pages[block]} * p.groups + item.group) * kTileBytes;
      bulk_prefetch_l2(static_cast<const uint8_t*>(p.k_PRBD) + offset, kTileBytes);
      bulk_prefetch_l2(static_cast<const uint8_t*>(p.v_PRBD) + offset, kTileBytes);
    };
    used_scratch = select_blocks(
        scores, own, wanted, scratch, shared.select, thread, [] { __syncthreads(); },
        [&](int block) { return pages[block]; }, hint, emit);
  } else if (thread < wanted) {
    emit(thread, thread, pages[thread]);
  }
  if (write_ids && thread >= max(wanted, 0) && thread < p.topk)
    ids[thread] = thread == wanted ? own : -1;
  return used_scratch;
}

// How many of the four lie below id.
__device__ __forceinline__ int count_below(int4 four, int id) {
  return (four.x < id ? 1 : 0) + (four.y < id ? 1 : 0) + (four.z < id ? 1 : 0) +
         (four.w < id ? 1 : 0);
}

// The union of the tokens' lists, ascending. Thread = (token, slot). The ids of a token
// are distinct, so an id is first where no earlier token has it.
template <int kTokens>
__device__ __forceinline__ void unite_blocks(const AttendDecodeParams& p, const Item& item,
                                             Shared<kTokens>& shared) {
  const int thread = threadIdx.x, token = thread / kSelectMaxTopk, slot = thread % kSelectMaxTopk;
  int32_t* ids = reinterpret_cast<int32_t*>(shared.ids);
  int own = INT_MAX;
  if (token < item.num_tokens && slot < p.topk && item.position + token >= 0) {
    const int64_t row = int64_t{item.group} * p.num_queries + item.first_row + token;
    const int id = p.ids_RTK[row * p.topk + slot];
    if (id >= 0) own = id;
  }
  if (token < kTokens) ids[thread] = own;
  if (thread == 0) shared.num_entries = 0;
  __syncthreads();
  int tokens = 0, page = 0;
  if (own != INT_MAX) {
    page = p.page_table[item.sequence * p.page_stride + own];
#pragma unroll
    for (int other = 0; other < kTokens; ++other) {
      bool found = false;
#pragma unroll
      for (int i = 0; i < kSelectMaxTopk / 4; ++i) {
        const int4 four = shared.ids[other][i];
        found |= four.x == own || four.y == own || four.z == own || four.w == own;
      }
      tokens |= found ? 1 << other : 0;
    }
  }
  const bool first = own != INT_MAX && (tokens & ((1 << token) - 1)) == 0;
  const int num_first = __popc(__ballot_sync(0xffffffffu, first));
  if (thread % 32 == 0) atomicAdd(&shared.num_entries, num_first);
  __syncthreads();
  if (token < kTokens && !first) ids[thread] = INT_MAX;
  __syncthreads();
  if (first) {
    int place = 0;
#pragma unroll
    for (int i = 0; i < kTokens * kSelectMaxTopk / 4; ++i)
      place += count_below(shared.ids[0][i], own);
    shared.entries[place] = {own, page, tokens};
  }
}

// --- copies

// Thread 0's side of the ring: tile 2i is K and tile 2i + 1 is V of the part's block i.
template <int kTokens>
struct Copies {
  const AttendDecodeParams& p;
  const Item& item;
  const Range& range;
  const CUtensorMap* k_map;
  const CUtensorMap* v_map;
  int num_tiles;
  uint8_t* ring;
  Shared<kTokens>& shared;
  int issued = 0, slot = 0, page = 0, next_page = 0;

  __device__ __forceinline__ int page_at(int at) const {
    if (at >= range.end) return 0;
    return item.all_keys ? p.page_table[item.sequence * p.page_stride + at]
                         : shared.entries[at].page;
  }
  // Issues tiles until `limit` have been; their slots are free.
  __device__ __forceinline__ void advance(int limit) {
    limit = min(limit, 2 * (range.end - range.begin));
    for (; issued < limit; ++issued) {
      if (issued % 2 == 0) {
        page = next_page;
        next_page =
            page_at(range.begin + issued / 2 + 1);  // a load that has a block's time to arrive
      }
      mbarrier_arrive_expect_tx(&shared.full[slot], kTileBytes);
      tma_load(ring + slot * kTileBytes, issued % 2 == 0 ? k_map : v_map, &shared.full[slot], 0,
               (page * p.groups + item.group) * kBlock, 0);
      if (++slot == num_tiles) slot = 0;
    }
  }
};

// --- attention of a CTA

// A fragments of the token's 16 heads, in the chunk order of the K fragments.
__device__ __forceinline__ void load_query(const AttendDecodeParams& p, const Item& item, int token,
                                           uint32_t (&query)[4][8]) {
  const int lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
  const int64_t heads = int64_t{p.groups} * p.heads_per_group;
  const uint4* rows =
      static_cast<const uint4*>(p.q_THD) +
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

template <int kTokens>
struct State {
  float o[kTokens][2][4];  // heads g, g+8; dims 16w + 8n + 2t and the next
  float maximum[kTokens][2],
      sum[kTokens][2];  // heads g, g+8; log2 units; the sum is of this lane's keys
};

// Logits of the warp's 16 keys in log2 units: s[..][n][..] are keys 8n + 2t, +1 of heads g (0, 1)
// and g+8 (2, 3). last: the first token's last visible key, relative to the first of the 16.
template <int kTokens>
__device__ __forceinline__ void logits(const uint8_t* k_tile, const uint32_t (&query)[4][8],
                                       const Shared<kTokens>& shared, int tokens, float scale,
                                       int last, float (&s)[kTokens][2][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
  const uint8_t* rows = k_tile + (16 * warp + quad) * 128;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if ((tokens >> token & 1) == 0) continue;
    float half[2][4] = {};  // for one token two chains of products: half the latency
#pragma unroll
    for (int n = 0; n < 2; ++n)
      s[token][n][0] = s[token][n][1] = s[token][n][2] = s[token][n][3] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4], b[4];
      if constexpr (kTokens == 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = query[i][e], b[e] = query[i][4 + e];
      } else {
        const uint4 low = shared.query[token][2 * i][lane],
                    high = shared.query[token][2 * i + 1][lane];
        a[0] = low.x, a[1] = low.y, a[2] = low.z, a[3] = low.w;
        b[0] = high.x, b[1] = high.y, b[2] = high.z, b[3] = high.w;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 key = *reinterpret_cast<const uint4*>(rows + 8 * n * 128 + i / 2 * kHalfBytes +
                                                          (((2 * t + i % 2) ^ quad) * 16));
        mma_m16n8k16_bf16(s[token][n], a, {key.x, key.y});
        mma_m16n8k16_bf16(kTokens == 1 ? half[n] : s[token][n], b, {key.z, key.w});
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[token][n][e] = 8 * n + 2 * t + e % 2 <= last + token
                             ? (s[token][n][e] + half[n][e]) * scale
                             : -INFINITY;
      }
    }
  }
}

// Row maxima of the warp's keys to shared memory.
template <int kTokens>
__device__ __forceinline__ void store_maxima(const float (&s)[kTokens][2][4], int tokens,
                                             Shared<kTokens>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if ((tokens >> token & 1) == 0) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(fmaxf(s[token][0][2 * h], s[token][0][2 * h + 1]),
                        fmaxf(s[token][1][2 * h], s[token][1][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      if (t == 0) shared.warp_max[token][quad + 8 * h][warp] = top;
    }
  }
}

// New maxima (the same in all warps), P to shared memory, the sums and O rescaled.
template <int kTokens>
__device__ __forceinline__ void softmax_step(const float (&s)[kTokens][2][4], int tokens,
                                             State<kTokens>& state, Shared<kTokens>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if ((tokens >> token & 1) == 0) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4* maxima = reinterpret_cast<const float4*>(shared.warp_max[token][quad + 8 * h]);
      const float4 a = maxima[0], b = maxima[1];
      const float old = state.maximum[token][h];
      const float next = fmaxf(old, fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)),
                                          fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w))));
      // Without any key so far both are -inf; their difference must not become a NaN.
      const float base = next == -INFINITY ? 0.0f : next, factor = exp2_approx(old - base);
      state.maximum[token][h] = next;
      float total = 0;
      uint8_t* row = shared.probabilities[token][quad + 8 * h] + (16 * warp + 2 * t) * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float low = exp2_approx(s[token][n][2 * h] - base),
                    high = exp2_approx(s[token][n][2 * h + 1] - base);
        total += low + high;
        *reinterpret_cast<uint32_t*>(row + 16 * n) = pack_bf16x2(low, high);
        state.o[token][n][2 * h] *= factor, state.o[token][n][2 * h + 1] *= factor;
      }
      state.sum[token][h] = state.sum[token][h] * factor + total;
    }
  }
}

// Both bf16 of a register pair survive where their key is visible: P is 0 elsewhere, but 0 x NaN is
// not.
__device__ __forceinline__ uint32_t visible_pair(int first_key, int last) {
  return (first_key <= last ? 0x0000ffffu : 0) | (first_key + 1 <= last ? 0xffff0000u : 0);
}

// O += P V. last: the first token's last visible key of the block.
template <int kTokens>
__device__ __forceinline__ void add_values(const uint8_t* v_tile, int tokens, int last,
                                           State<kTokens>& state, const Shared<kTokens>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const int key = lane % 16, chunk = 2 * warp % 8 + lane / 16;
  const uint8_t* v_row = v_tile + warp / 4 * kHalfBytes + key * 128 + ((chunk ^ (key & 7)) * 16);
  const uint8_t* p_row = shared.probabilities[0][lane % 16] + lane / 16 * 16;
  constexpr int kBatch =
      kTokens == 1 ? 2 : 4;  // steps whose loads are in flight together; registers allow no more
#pragma unroll
  for (int first = 0; first < kBlock / 16; first += kBatch) {
    uint32_t v[kBatch][4];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) ldmatrix_x4_transposed(v[k], v_row + (first + k) * 16 * 128);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const int last_key = last + token - 16 * first;  // relative to the batch
      if ((tokens >> token & 1) == 0 || last_key < 0) continue;
      uint32_t prob[kBatch][4];
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        ldmatrix_x4(prob[k], p_row + token * kHeads * kProbStride + (first + k) * 32);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        uint32_t low[2] = {v[k][0], v[k][1]}, high[2] = {v[k][2], v[k][3]};
        if (last_key < 16 * kBatch - 1) {
          const uint32_t keep0 = visible_pair(16 * k + 2 * t, last_key),
                         keep1 = visible_pair(16 * k + 2 * t + 8, last_key);
          low[0] &= keep0, low[1] &= keep1, high[0] &= keep0, high[1] &= keep1;
        }
        mma_m16n8k16_bf16(state.o[token][0], prob[k], low);
        mma_m16n8k16_bf16(state.o[token][1], prob[k], high);
      }
    }
  }
}

template <int kTokens>
__device__ __forceinline__ void attend_blocks(const AttendDecodeParams& p, const Item& item,
                                              Copies<kTokens>& copies,
                                              const uint32_t (&query)[4][8], State<kTokens>& state,
                                              Shared<kTokens>& shared) {
  const int warp = threadIdx.x / 32;
  const Range range = copies.range;
  int slot = 0, round = 0;
  const auto next_tile = [&] {
    mbarrier_wait(&shared.full[slot], round & 1);
    const uint8_t* tile = copies.ring + slot * kTileBytes;
    if (++slot == copies.num_tiles) slot = 0, ++round;
    return tile;
  };
  for (int at = range.begin; at < range.end; ++at) {
    const int block = item.all_keys ? at : shared.entries[at].block;
    const int tokens = item.all_keys ? (1 << item.num_tokens) - 1 : shared.entries[at].tokens;
    const int last = item.position - block * kBlock;  // of the first token
    float s[kTokens][2][4];
    logits<kTokens>(next_tile(), query, shared, tokens, p.scale_log2, last - 16 * warp, s);
    store_maxima<kTokens>(s, tokens, shared);
    __syncthreads();
    // All warps are through with this block's K and the block before's V.
    if (threadIdx.x == 0) copies.advance(2 * (at - range.begin) + 1 + copies.num_tiles);
    softmax_step<kTokens>(s, tokens, state, shared);
    __syncthreads();
    add_values<kTokens>(next_tile(), tokens, last, state, shared);
  }
}

// --- merging

// Weight of a part with maximum m where the whole has maximum `top`; 0 for a part without keys.
__device__ __forceinline__ float part_weight(float m, float top) {
  return m == -INFINITY ? 0.0f : exp2_approx(m - top);
}

// Row i of the item (token x heads_per_group + head) is merged by CTA i % cluster of the cluster,
// as its row i / cluster; cluster is a power of two. Before: every CTA of the cluster runs.
template <int kTokens>
__device__ __forceinline__ void send_rows(const AttendDecodeParams& p, const Item& item, int rank,
                                          int cluster, const State<kTokens>& state,
                                          Shared<kTokens>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.sum[token][h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (t == 0) shared.warp_sum[token][quad + 8 * h][warp] = sum;
      const int head = quad + 8 * h, i = token * p.heads_per_group + head;
      if (token >= item.num_tokens || head >= p.heads_per_group) continue;
      const float* to = &shared.part[(i & -cluster) + rank][16 * warp + 2 * t];
      const uint32_t address = cluster_address(to, static_cast<uint32_t>(i & (cluster - 1)));
      cluster_store_f32x2(address, state.o[token][0][2 * h], state.o[token][0][2 * h + 1]);
      cluster_store_f32x2(address + 32, state.o[token][1][2 * h], state.o[token][1][2 * h + 1]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = quad + 8 * h, i = token * p.heads_per_group + head;
      if (warp != token || t != 0 || token >= item.num_tokens || head >= p.heads_per_group)
        continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared.warp_sum[token][head][w];
      const float2* to = &shared.part_stat[(i & -cluster) + rank];
      cluster_store_f32x2(cluster_address(to, static_cast<uint32_t>(i & (cluster - 1))),
                          state.maximum[token][h], sum);
    }
  }
}

// Unnormalised row with its maximum (log2 units) and sum: the result, or one split's part of it.
__device__ __forceinline__ void write_row(const AttendDecodeParams& p, int64_t row, float top,
                                          float sum, float4 total, int split, int splits) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = p.num_queries * p.groups * p.heads_per_group;
  if (splits > 1) {
    reinterpret_cast<float4*>(p.partial)[(split * rows + row) * (kDim / 4) + lane] = total;
    if (lane == 0)
      reinterpret_cast<float2*>(p.partial + int64_t{splits} * rows * kDim)[split * rows + row] = {
          top, sum};
    return;
  }
  const float scale = sum == 0 ? 0.0f : 1.0f / sum;
  const uint2 packed = {pack_bf16x2(total.x * scale, total.y * scale),
                        pack_bf16x2(total.z * scale, total.w * scale)};
  static_cast<uint2*>(p.o_THD)[row * (kDim / 4) + lane] = packed;
  if (lane == 0 && p.lse_TH != nullptr)
    p.lse_TH[row] = sum == 0 ? -INFINITY : kLn2 * (top + log2f(sum));
}

template <int kTokens>
__device__ __forceinline__ void merge_rows(const AttendDecodeParams& p, const Item& item, int rank,
                                           int cluster, const Shared<kTokens>& shared, int split,
                                           int splits) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = item.num_tokens * p.heads_per_group;
  for (int mine = warp; mine * cluster + rank < rows; mine += kThreads / 32) {
    // Lane c holds the statistics of sender c; all sums run in the order of the senders or over a
    // fixed tree.
    const float2 stat =
        lane < cluster ? shared.part_stat[mine * cluster + lane] : float2{-INFINITY, 0};
    const float top = score_of_bits(__reduce_max_sync(0xffffffffu, ordered_bits(stat.x)));
    const float weight = part_weight(stat.x, top);
    float sum = weight * stat.y;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    float4 total = {0, 0, 0, 0};
#pragma unroll 8
    for (int c = 0; c < cluster; ++c) {
      const float4 part = reinterpret_cast<const float4*>(shared.part[mine * cluster + c])[lane];
      const float w = __shfl_sync(0xffffffffu, weight, c);
      total.x += w * part.x, total.y += w * part.y, total.z += w * part.z, total.w += w * part.w;
    }
    const int i = mine * cluster + rank, token = kTokens == 1 ? 0 : i / p.heads_per_group;
    const int64_t row =
        ((int64_t{item.first_row} + token) * p.groups + item.group) * p.heads_per_group +
        (i - token * p.heads_per_group);
    write_row(p, row, top, sum, total, split, splits);
  }
}

// --- the kernel

template <int kTokens>
__global__ __launch_bounds__(kThreads, kTokens == 1 ? 2 : 1) void attend_decode_kernel(
    const AttendDecodeParams p, const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map, int token_tiles, int cluster, int splits,
    int num_tiles) {
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* ring = smem;
  Shared<kTokens>& shared = *reinterpret_cast<Shared<kTokens>*>(smem + num_tiles * kTileBytes);
  const int rank = static_cast<int>(cluster_cta_rank());

  int at = blockIdx.x / cluster;
  const int split = at % splits;
  at /= splits;
  const int token_tile = at % token_tiles;
  at /= token_tiles;
  Item item;
  item.group = at % p.groups;
  item.sequence = at / p.groups;
  const int first_row = p.cu_q[item.sequence], queries = p.cu_q[item.sequence + 1] - first_row;
  item.first_row = first_row + token_tile * kTokens;
  item.num_tokens = min(kTokens, queries - token_tile * kTokens);
  item.position = p.seq_lens[item.sequence] - queries + token_tile * kTokens;
  item.all_keys = p.scores_TRM == nullptr && p.ids_RTK == nullptr;

  if (threadIdx.x == 0) {
    for (int i = 0; i < num_tiles; ++i) mbarrier_init(&shared.full[i], 1);
    mbarrier_init_fence();
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
  }
  if (cluster > 1) cluster_arrive();
  const int last_position = item.position + item.num_tokens - 1;
  const bool chooses = p.scores_TRM != nullptr;
  const int32_t* pages = nullptr;
  if constexpr (kTokens == 1) {
    if (chooses) pages = fetch_pages(p, item, shared);
  }
  __syncthreads();
  // Where the list is not read from memory its length is known already.
  int total = item.num_tokens <= 0 || last_position < 0 ? 0 : last_position / kBlock + 1;
  if (chooses) total = min(total, p.topk);
  const int part = split * cluster + rank, parts = splits * cluster;
  Range range = {part_begin(total, part, parts), part_begin(total, part + 1, parts)};
  grid_dependency_wait();
  grid_dependency_launch();

  uint32_t query[4][8] = {};
  bool used_ring = false;
  if (item.num_tokens > 0) {
    if constexpr (kTokens == 1) {
      if (chooses) {
        used_ring = choose_blocks(p, item, pages, rank, cluster,
                                  rank == 0 && split == 0 && p.ids_RTK != nullptr, ring, shared);
      } else if (!item.all_keys) {
        unite_blocks(p, item, shared);
      }
    } else {
      const int token = threadIdx.x / 32;
      if (token < item.num_tokens) {
        load_query(p, item, token, query);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          shared.query[token][i][threadIdx.x % 32] = {
              query[i / 2][i % 2 * 4], query[i / 2][i % 2 * 4 + 1], query[i / 2][i % 2 * 4 + 2],
              query[i / 2][i % 2 * 4 + 3]};
        }
      }
      if (!item.all_keys) unite_blocks(p, item, shared);
    }
  }
  if (used_ring) fence_async_shared();  // ordinary stores; the copy engine writes there next
  __syncthreads();

  if (!item.all_keys && !chooses) {
    total = item.num_tokens > 0 ? shared.num_entries : 0;
    range = {part_begin(total, part, parts), part_begin(total, part + 1, parts)};
  }
  Copies<kTokens> copies = {.p = p,
                            .item = item,
                            .range = range,
                            .k_map = &k_map,
                            .v_map = &v_map,
                            .num_tiles = num_tiles,
                            .ring = ring,
                            .shared = shared};
  if (threadIdx.x == 0) {
    copies.next_page = copies.page_at(range.begin);
    copies.advance(num_tiles);
  }
  if constexpr (kTokens == 1) {
    if (item.num_tokens > 0) load_query(p, item, 0, query);  // arrives with the first keys
  }
  State<kTokens> state = {};
#pragma unroll
  for (int token = 0; token < kTokens; ++token)
    state.maximum[token][0] = state.maximum[token][1] = -INFINITY;
  attend_blocks<kTokens>(p, item, copies, query, state, shared);
  if (cluster > 1)
    cluster_wait();  // every CTA of the cluster has started: its shared memory may be written
  send_rows<kTokens>(p, item, rank, cluster, state, shared);
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  merge_rows<kTokens>(p, item, rank, cluster, shared, split, splits);
}

// The splits of a row in order; one warp per row.
__global__ __launch_bounds__(128) void attend_decode_merge_kernel(const AttendDecodeParams p,
                                                                  int splits) {
  const int64_t rows = p.num_queries * p.groups * p.heads_per_group;
  const int64_t row = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_dependency_wait();
  if (row >= rows) return;
  const float4* parts = reinterpret_cast<const float4*>(p.partial);
  const float2* stats = reinterpret_cast<const float2*>(p.partial + splits * rows * kDim);
  float top = -INFINITY, sum = 0;
#pragma unroll 8
  for (int s = 0; s < splits; ++s) top = fmaxf(top, __ldcg(&stats[s * rows + row]).x);
  float4 total = {0, 0, 0, 0};
#pragma unroll 8
  for (int s = 0; s < splits; ++s) {
    const float2 stat = __ldcg(&stats[s * rows + row]);
    const float weight = part_weight(stat.x, top);
    const float4 part = __ldcg(&parts[(s * rows + row) * (kDim / 4) + lane]);
    sum += weight * stat.y;
    total.x += weight * part.x, total.y += weight * part.y, total.z += weight * part.z,
        total.w += weight * part.w;
  }
  write_row(p, row, top, sum, total, 0, 1);
}

CUtensorMap cache_map(const void* pages, int64_t num_pages, int groups) {
  return tensor_map_create(
      pages, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      {{kDim / 2, 2, kDim / 2}, {num_pages * groups * kBlock, kDim * 2, kBlock}, {2, kDim, 2}},
      MapSwizzle::k128Bytes);
}

int tokens_of_item(int64_t max_q_len) {
  return max_q_len == 1 ? 1 : kMaxTokens;
}

template <int kTokens>
void launch(const AttendDecodeParams& params, int64_t max_q_len, const AttendDecodeTuning& tuning,
            cudaStream_t stream) {
  constexpr int kNumTiles = kTokens == 1 ? 3 : 4;
  const int64_t bytes =
      int64_t{kNumTiles} * kTileBytes + static_cast<int64_t>(sizeof(Shared<kTokens>));
  const auto kernel = attend_decode_kernel<kTokens>;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)));
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  const int token_tiles = static_cast<int>((max_q_len + kTokens - 1) / kTokens);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = tuning.dependent ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(tuning.cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(int64_t{params.num_seqs} * token_tiles *
                                              params.groups * tuning.splits * tuning.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = tuning.cluster > 1 ? 2 : 1;
  const CUtensorMap k_map = cache_map(params.k_PRBD, params.num_pages, params.groups);
  const CUtensorMap v_map = cache_map(params.v_PRBD, params.num_pages, params.groups);
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params, k_map, v_map, token_tiles,
                                   tuning.cluster, tuning.splits, kNumTiles));
  if (tuning.splits == 1) return;
  const int64_t rows = params.num_queries * params.groups * params.heads_per_group;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>((rows + 3) / 4));
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = 0;
  config.numAttrs = 1;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, attend_decode_merge_kernel, params, tuning.splits));
}

}  // namespace

std::string attend_decode_supports(const MsaGeometry& g, int64_t max_q_len, int64_t max_blocks) {
  if (g.head_dim != kDim) return fmt::format("head_dim {} (wants {})", g.head_dim, kDim);
  if (g.block != kBlock) return fmt::format("block {} (wants {})", g.block, kBlock);
  if (g.heads_per_group > kHeads)
    return fmt::format("heads_per_group {} (wants at most {})", g.heads_per_group, kHeads);
  if (g.topk > kSelectMaxTopk)
    return fmt::format("topk {} (wants at most {})", g.topk, kSelectMaxTopk);
  if (max_q_len > 16)
    return fmt::format("{} query tokens of a sequence (wants at most 16)", max_q_len);
  if (max_blocks > kMaxBlocks)
    return fmt::format("{} blocks (wants at most {})", max_blocks, kMaxBlocks);
  return "";
}

AttendDecodeTuning attend_decode_tuning(const MsaGeometry& g, int num_seqs, int64_t max_q_len,
                                        int64_t max_k_len, bool full) {
  const int64_t tokens = tokens_of_item(max_q_len);
  const int64_t items =
      std::max<int64_t>(1, int64_t{num_seqs} * g.groups * ((max_q_len + tokens - 1) / tokens));
  AttendDecodeTuning tuning;
  // Measured (docs/lab/decode.md): about one CTA per SM for wide clusters, which otherwise wait for
  // places side by side; two per SM for pairs.
  while (tuning.cluster < 16 && items * tuning.cluster * 2 <= (tuning.cluster == 1 ? 264 : 132))
    tuning.cluster *= 2;
  if (full) {
    // One CTA an SM beats two, and splits beat clusters (docs/lab/decode.md).
    constexpr int64_t kTarget = 132;
    const int64_t blocks = std::max<int64_t>(1, max_k_len / kBlock);
    tuning.cluster = 1;
    tuning.splits =
        static_cast<int>(std::clamp<int64_t>(kTarget / items, 1, std::max<int64_t>(1, blocks / 2)));
  }
  return tuning;
}

int64_t attend_decode_workspace_bytes(const MsaGeometry& g, int64_t num_queries, int splits) {
  return splits > 1 ? num_queries * g.heads() * splits * (kDim + 2) * 4 : 0;
}

void attend_decode(const AttendDecodeParams& params, int64_t max_q_len,
                   const AttendDecodeTuning& tuning, Stream stream) {
  if (params.num_seqs == 0 || params.num_queries == 0) return;
  M3_CHECK(params.scores_TRM == nullptr || max_q_len == 1,
           "decode attention: {} query tokens per sequence; blocks are chosen from scores for one "
           "token only, pass ids",
           max_q_len);
  M3_CHECK(params.scores_TRM == nullptr ||
               select_scratch_bytes(params.score_stride, params.topk - 1) <= 3 * kTileBytes,
           "decode attention: the choice among {} blocks for topk {} does not fit; pass ids",
           params.score_stride, params.topk);
  M3_CHECK(tuning.splits >= 1 && int64_t{tuning.splits} * tuning.cluster <= kMaxParts,
           "decode attention: {} splits of {} CTAs, want at most {} parts", tuning.splits,
           tuning.cluster, kMaxParts);
  M3_CHECK(tuning.splits == 1 || params.partial != nullptr,
           "decode attention: {} splits need a workspace", tuning.splits);
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (tokens_of_item(max_q_len) == 1) return launch<1>(params, max_q_len, tuning, handle);
  launch<kMaxTokens>(params, max_q_len, tuning, handle);
}

}  // namespace m3
