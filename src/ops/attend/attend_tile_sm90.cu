// Query-outer half of the prefill attention on Hopper (hopper.md §6.4): a tile of 8 neighbouring queries of
// one group (128 rows of 16 heads) runs once through its shared blocks, then adds the partial results of
// its pairs, and writes O and LSE. With all blocks listed it is the dense causal kernel.
//
// Persistent, one CTA per SM, tiles handed out in sequence order, one group at a time, so that neighbouring
// tiles find their blocks in L2.
//   warpgroup 0: producer (1 warp): forms the union of the 8 lists (32 lanes hold them), sorts its blocks
//   into shared and pairs, loads Q, K and V tiles and partial results into the ring.
//   warpgroups 1, 2: 4 queries each, one warp per query. S = Q K^T of the next block runs together with
//   O += P V of the last one; blocks that none of the 4 queries wants are skipped, and a warp whose query
//   does not want the block leaves P = 0.
// Shared memory: 2 Q tiles x 32 KB, 5 stages x 32 KB (K and V in turn, or one partial result of each of the
// 8 queries) = 224 KB; 128-byte swizzle. Work: 4 * 128 * 128 * 128 FLOP per 64 KB of K and V (L2).
#include "hopper/fence.cuh"
#include "hopper/tma.cuh"
#include "ops/attend/attend_sm90.cuh"

namespace m3 {
namespace {

using namespace attend_sm90_detail;

constexpr int kRows = kQueries * kHeads;
constexpr int kStages = 5, kQueryBuffers = 2, kConsumerWarps = 8;
constexpr int kHalfQueryBytes = kRows * 128, kQueryBytes = 2 * kHalfQueryBytes;
constexpr int kPartialBytes = kTileBytes / kQueries;  // bf16 O of one query
constexpr int kSmemBytes = kQueryBuffers * kQueryBytes + kStages * kTileBytes + 1024;
constexpr int kThreads = 384;

struct Params {
  MsaBatch batch;
  const int32_t* ids_RTK;  // or absent: dense
  __nv_bfloat16* o_THD;
  float* lse_TH;
  int groups, threshold, chunk, chunk_tiles;
  float scale_log2;
  AttendWorkspace ws;
};

struct TileWork {
  TileRows rows;
  int32_t group;        // -1: no more work
  int32_t has_entries;
  int32_t tail;         // keys of the own block that exist, 1..128
  int32_t partial0;     // index of the first partial result of query 0
};

// Entry of the ring: the queries (bits 0..7) that a block, or a partial result, belongs to.
constexpr uint32_t kOwnBlock = 1u << 8, kPartial = 1u << 9, kLastEntry = 1u << 10;

struct __align__(8) Shared {
  uint64_t query_full[kQueryBuffers], query_empty[kQueryBuffers];
  uint64_t full[kStages], empty[kStages];
  TileWork work[kQueryBuffers];
  uint32_t entry[kStages];
};

// The ids of the tile's 8 queries in registers, 4 lanes per query.
template <int kTopk>
struct Union {
  static constexpr int kPerLane = kTopk / 4;
  int32_t id[kPerLane];
  int num_pairs;  // of this lane's ids so far

  __device__ __forceinline__ void load(const Params& p, const TileWork& w, int lane) {
    const int row = w.rows.row0 + lane / 4;
    const bool live = row >= w.rows.begin && row < w.rows.end && w.rows.position0 >= 0;
    const int32_t* ids = p.ids_RTK + (w.group * p.batch.num_queries + row) * kTopk + lane % 4 * kPerLane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      id[j] = live ? ids[j] : -1;
      if (id[j] < 0) id[j] = kNone;
    }
    num_pairs = 0;
  }
  __device__ __forceinline__ int lowest() const {
    int low = id[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) low = min(low, id[j]);
    return static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<uint32_t>(low)));
  }
  // Removes block b and returns the queries that share it; the others of its queries have it as a pair.
  __device__ __forceinline__ uint32_t take(int b, int threshold, int lane) {
    bool mine = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (id[j] == b) {
        mine = true;
        id[j] = kNone;
      }
    }
    uint32_t lanes = __ballot_sync(0xffffffffu, mine);
    lanes |= lanes >> 1;
    lanes = (lanes | lanes >> 2) & 0x11111111u;  // bit 4q: any of query q's lanes
    if (__popc(lanes & 0xffffu) < threshold) {
      if (mine && lane < 16) ++num_pairs;
      lanes &= 0xffff0000u;
    }
    if (__popc(lanes & 0xffff0000u) < threshold) {
      if (mine && lane >= 16) ++num_pairs;
      lanes &= 0xffffu;
    }
    uint32_t mask = 0;
#pragma unroll
    for (int q = 0; q < kQueries; ++q) mask |= (lanes >> (4 * q) & 1) << q;
    return mask;
  }
  // The next shared block, or kNone.
  __device__ __forceinline__ int next(uint32_t& mask, int threshold, int lane) {
    while (true) {
      const int b = lowest();
      if (b == kNone) return kNone;
      mask = take(b, threshold, lane);
      if (mask != 0) return b;
    }
  }
  __device__ __forceinline__ int pairs_of_query() const {  // all lanes of the query get it
    int sum = num_pairs + __shfl_xor_sync(0xffffffffu, num_pairs, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
};

// Waits for a free stage and announces what comes.
__device__ __forceinline__ int open_stage(Shared& shared, int step, uint32_t entry, uint32_t bytes) {
  const int stage = step % kStages;
  mbarrier_wait(&shared.empty[stage], (step / kStages & 1) ^ 1);
  shared.entry[stage] = entry;
  mbarrier_arrive_expect_tx(&shared.full[stage], bytes);
  return stage;
}

__device__ __forceinline__ void load_tile(const CUtensorMap& map, char* smem_stages, Shared& shared, int step,
                                          uint32_t entry, int group, KvPlace at) {
  const int stage = open_stage(shared, step, entry, kTileBytes);
  char* to = smem_stages + stage * kTileBytes;
  tma_load(to, &map, &shared.full[stage], 0, at.token, group, at.page);
  tma_load(to + kHalfBytes, &map, &shared.full[stage], 64, at.token, group, at.page);
}

template <int kTopk>  // 0: dense
__device__ __forceinline__ void produce(const Params& p, const CUtensorMap& query_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, char* smem_query, char* smem_stages, Shared& shared,
                                        int lane) {
  const int first_tile = p.chunk * p.chunk_tiles;
  const int tiles = max(0, min(p.chunk_tiles, p.ws.counters[AttendWorkspace::kTiles] - first_tile));
  int32_t* next_unit = p.ws.counters + AttendWorkspace::kPerChunk + 2 * p.chunk;
  int step = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    int unit = 0;
    if (lane == 0) unit = atomicAdd(next_unit, 1);
    unit = __shfl_sync(0xffffffffu, unit, 0);
    TileWork work = {};
    work.group = -1;
    MsaSequence seq;
    int own = -1;
    Union<kTopk == 0 ? 4 : kTopk> ids;
    if (unit < tiles * p.groups) {
      // Dense tiles grow with the position: longest first. Sparse ones follow the sequence.
      const int tile = kTopk == 0 ? tiles - 1 - unit / p.groups : unit % tiles;
      work.group = kTopk == 0 ? unit % p.groups : unit / tiles;
      const int n = msa_find(p.ws.tile_begin, p.batch.num_seqs, first_tile + tile);
      seq = msa_sequence(p.batch, n);
      work.rows = tile_rows(seq, first_tile + tile - p.ws.tile_begin[n]);
      work.partial0 = (work.group * p.chunk_tiles + tile) * kQueries * (kTopk == 0 ? 0 : kTopk - 1);
      own = work.rows.position0 < 0 ? -1 : work.rows.position0 / kBlock;
      work.tail = min(kBlock, seq.k_len - own * kBlock);
      if constexpr (kTopk == 0) {
        work.has_entries = own >= 0;
      } else {
        ids.load(p, work, lane);
        work.has_entries = ids.lowest() != kNone;
      }
    }
    if (lane == 0) {
      mbarrier_wait(&shared.query_empty[buffer], (round / kQueryBuffers & 1) ^ 1);
      shared.work[buffer] = work;
      if (work.group < 0) {
        mbarrier_arrive(&shared.query_full[buffer]);
      } else {
        mbarrier_arrive_expect_tx(&shared.query_full[buffer], kQueryBytes);
        char* q = smem_query + buffer * kQueryBytes;
        tma_load(q, &query_map, &shared.query_full[buffer], 0, work.group * kHeads, work.rows.row0);
        tma_load(q + kHalfQueryBytes, &query_map, &shared.query_full[buffer], 64, work.group * kHeads, work.rows.row0);
      }
    }
    if (work.group < 0) return;

    const auto push = [&](int block, uint32_t entry) {
      if (lane == 0) {
        const KvPlace at = kv_place(p.batch, seq, block);
        load_tile(k_map, smem_stages, shared, step, entry, work.group, at);
        load_tile(v_map, smem_stages, shared, step + 1, entry, work.group, at);
      }
      step += 2;
      __syncwarp();
    };

    if constexpr (kTopk == 0) {
      uint32_t live = 0;
      for (int q = 0; q < kQueries; ++q) {
        if (work.rows.row0 + q >= work.rows.begin && work.rows.row0 + q < work.rows.end) live |= 1u << q;
      }
      for (int i = 0; i <= own; ++i) {  // the own block first: every row has a finite maximum from then on
        push(i == 0 ? own : i - 1, live | (i == 0 ? kOwnBlock : 0) | (i == own ? kLastEntry : 0));
      }
    } else if (work.has_entries) {
      uint32_t mask = own >= 0 ? ids.take(own, 1, lane) : 0, flags = kOwnBlock;
      int block = own;
      if (mask == 0) block = ids.next(mask, p.threshold, lane), flags = 0;
      while (block != kNone) {  // one block behind, so that the last one is known
        uint32_t next_mask = 0;
        const int next = ids.next(next_mask, p.threshold, lane);
        if (next == kNone && p.threshold == 1) flags |= kLastEntry;
        if (next == kNone && p.threshold > 1 && !__any_sync(0xffffffffu, ids.num_pairs > 0)) flags |= kLastEntry;
        push(block, mask | flags);
        block = next, mask = next_mask, flags = 0;
      }
      if (p.threshold > 1) {
        const int mine = ids.pairs_of_query();
        const int most = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(mine)));
        for (int s = 0; s < most; ++s, ++step) {
          const uint32_t lanes = __ballot_sync(0xffffffffu, s < mine);
          uint32_t queries = 0;
#pragma unroll
          for (int q = 0; q < kQueries; ++q) queries |= (lanes >> (4 * q) & 1) << q;
          if (lane == 0) {
            open_stage(shared, step, queries | kPartial | (s + 1 == most ? kLastEntry : 0),
                       __popc(queries) * kPartialBytes);
          }
          __syncwarp();
          if (lane % 4 == 0 && s < mine) {
            const int stage = step % kStages, q = lane / 4;
            bulk_load(smem_stages + stage * kTileBytes + q * kPartialBytes,
                      p.ws.partial_o + int64_t{work.partial0 + q * (kTopk - 1) + s} * 256, kPartialBytes,
                      &shared.full[stage]);
          }
          __syncwarp();
        }
      }
    }
  }
}

struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};  // of the raw logits, rows lane / 4 and lane / 4 + 8
  float sum[2] = {0, 0};                      // of this lane's columns
};

// Turns logits into weights in place; `old` gets the factors for what was summed before.
__device__ __forceinline__ void softmax_step(float (&s)[64], RowState& state, float (&old)[2], float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float top = fmaxf(row_maximum(s, row), state.maximum[row]);
    old[row] = exp2_approx((state.maximum[row] - top) * scale_log2);
    state.maximum[row] = top;
    state.sum[row] = state.sum[row] * old[row] + exponentiate_row(s, row, top, scale_log2);
  }
}

// O = O old + weight * partial result, whose maximum and sum are `ml`.
__device__ __forceinline__ void add_partial(float (&o)[64], RowState& state, const uint4* partial, const float2 (&ml)[2],
                                            float scale_log2, int lane) {
  float old[2], weight[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float top = fmaxf(state.maximum[row], ml[row].x);
    old[row] = exp2_approx((state.maximum[row] - top) * scale_log2);
    weight[row] = exp2_approx((ml[row].x - top) * scale_log2);
    state.maximum[row] = top;
    // The partial sum is complete, this lane's own one is a share of four.
    state.sum[row] = state.sum[row] * old[row] + (lane % 4 == 0 ? ml[row].y * weight[row] : 0.0f);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 words = partial[i * 32 + lane];
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = o[8 * i + 2 * j];
      float& y = o[8 * i + 2 * j + 1];
      x = fmaf(unpack_bf16_low(w[j]), weight[j % 2], x * old[j % 2]);
      y = fmaf(unpack_bf16_high(w[j]), weight[j % 2], y * old[j % 2]);
    }
  }
}

// Writes O and LSE of one warp's query (16 rows of 128 channels) and reports non-finite rows.
__device__ __forceinline__ void write_query(const Params& p, const TileWork& work, int query, const float (&o)[64],
                                            const RowState& state, int lane) {
  const int row = work.rows.row0 + query;
  if (row < work.rows.begin || row >= work.rows.end) return;
  const int H = p.groups * kHeads;
  float finite = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    const int head = work.group * kHeads + lane / 4 + 8 * half;
    if (lane % 4 == 0 && p.lse_TH != nullptr) {
      p.lse_TH[int64_t{row} * H + head] =
          sum == 0 ? -INFINITY : state.maximum[half] * (p.scale_log2 * kLn2) + logf(sum);
    }
    __nv_bfloat16* out = p.o_THD + (int64_t{row} * H + head) * kDim;
    // 4 x 4 transposes inside each quad turn 4-byte pieces into 16-byte stores.
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = o[4 * (j + i) + 2 * half] * inverse, y = o[4 * (j + i) + 2 * half + 1] * inverse;
        finite += (x - x) + (y - y);
        w[i] = pack_bf16x2(x, y);
      }
      const bool odd = lane & 1, high = lane & 2;
      const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
      const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
      const uint32_t even0 = odd ? a : w[0], even1 = odd ? w[1] : a;
      const uint32_t even2 = odd ? b : w[2], even3 = odd ? w[3] : b;
      const uint32_t c = __shfl_xor_sync(0xffffffffu, high ? even0 : even2, 2);
      const uint32_t d = __shfl_xor_sync(0xffffffffu, high ? even1 : even3, 2);
      const uint4 piece = high ? make_uint4(c, d, even2, even3) : make_uint4(even0, even1, c, d);
      *reinterpret_cast<uint4*>(out + 8 * (j + lane % 4)) = piece;
    }
  }
  if (__any_sync(0xffffffffu, finite != 0.0f) && lane == 0) {
    p.ws.repair[atomicAdd(&p.ws.counters[AttendWorkspace::kRepairs], 1)] = {row, work.group};
  }
}

// Values behind the sequence's end become zeros: their weights are 0, but 0 x NaN is not. Both warpgroups
// do it for themselves and write the same.
__device__ __forceinline__ void clear_tail(char* values, int tail, int consumer) {
  for (int i = threadIdx.x % 128; i < (kBlock - tail) * 16; i += 128) {
    const int row = tail + i / 16, half = i / 8 % 2;
    *reinterpret_cast<uint4*>(values + half * kHalfBytes + row * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_async_shared();
  named_barrier_sync(1 + consumer, 128);
}

template <int kTopk>
__device__ __forceinline__ void consume(const Params& p, const char* smem_query, char* smem_stages, Shared& shared,
                                        int consumer, int warp, int lane) {
  const int query = consumer * 4 + warp % 4;  // of the tile
  const uint64_t stage_keys = descriptor_k_major(smem_stages), stage_values = descriptor_mn_major(smem_stages, kHalfBytes);
  int step = 0;
  const auto wait_full = [&](int at) { mbarrier_wait(&shared.full[at % kStages], at / kStages & 1); };
  const auto release = [&](int at) {  // by every consumer warp: warps may drift apart over skipped entries
    if (lane == 0) mbarrier_arrive(&shared.empty[at % kStages]);
  };

  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    mbarrier_wait(&shared.query_full[buffer], round / kQueryBuffers & 1);
    if (__shfl_sync(0xffffffffu, shared.work[buffer].group, 0) < 0) return;
    const uint64_t query_rows = descriptor_k_major(smem_query + buffer * kQueryBytes + consumer * 64 * 128);

    RowState state;
    float o[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) o[j] = 0;
    uint32_t weights[8][4];
    float s[64];
    // Entries until the last one or the first partial result. `entry` is the one taken last.
    int at = 0;
    bool ended = __shfl_sync(0xffffffffu, shared.work[buffer].has_entries, 0) == 0, partials = false;
    uint32_t entry = 0;
    // Looks at the next entry: does any of this warpgroup's queries want the block? Then takes it.
    const auto take_wanted = [&] {
      if (ended) return false;
      wait_full(step);
      const uint32_t next = __shfl_sync(0xffffffffu, shared.entry[step % kStages], 0);
      partials = next & kPartial;
      ended = partials;
      if (partials || (next >> (4 * consumer) & 0xf) == 0) return false;
      at = step;
      step += 2;
      entry = next;
      ended = next & kLastEntry;
      return true;
    };
    // Gives unwanted blocks back. No V tile may be held meanwhile: the ring would stand still.
    const auto skip_to_wanted = [&] {
      while (!take_wanted()) {
        if (ended) return false;
        wait_full(step + 1);
        ended = __shfl_sync(0xffffffffu, shared.entry[step % kStages], 0) & kLastEntry;
        release(step);
        release(step + 1);
        step += 2;
      }
      return true;
    };
    const auto wanted = [&] { return (entry >> query & 1) != 0; };
    const auto clear_logits = [&] {
#pragma unroll
      for (int j = 0; j < 64; ++j) s[j] = 0;
    };
    float old[2];

    while (skip_to_wanted()) {
      issue_qk<kHalfQueryBytes>(s, query_rows, descriptor_advance(stage_keys, at % kStages * kTileBytes));
      wgmma_wait<0>();
      wgmma_pin(s);
      release(at);
      int values = at + 1;  // ring position of the V tile that `weights` belong to
      if (entry & kOwnBlock) {  // the only block that a row may see in part, or that may be incomplete
        const int tail = shared.work[buffer].tail;
        if (tail < kBlock) {
          wait_full(values);
          clear_tail(smem_stages + values % kStages * kTileBytes, tail, consumer);
        }
        const int limit = shared.work[buffer].rows.position0 % kBlock + query;  // last visible column
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          if (8 * (j / 4) + 2 * (lane % 4) + j % 2 > limit) s[j] = -INFINITY;
        }
      }
      old[0] = old[1] = 1;
      if (wanted()) {
        softmax_step(s, state, old, p.scale_log2);
      } else {
        clear_logits();
      }
#pragma unroll
      for (int j = 0; j < 64; ++j) o[j] *= old[j / 2 % 2];
      pack_weights(s, weights);
      while (take_wanted()) {
        wait_full(values);  // loaded before this entry's K
        issue_qk<kHalfQueryBytes>(s, query_rows, descriptor_advance(stage_keys, at % kStages * kTileBytes));
        issue_pv<true>(o, weights, descriptor_advance(stage_values, values % kStages * kTileBytes));
        wgmma_wait<1>();
        wgmma_pin(s);
        release(at);
        old[0] = old[1] = 1;
        if (wanted()) {
          softmax_step(s, state, old, p.scale_log2);
        } else {
          clear_logits();
        }
        wgmma_wait<0>();
        wgmma_pin(o);
        release(values);
#pragma unroll
        for (int j = 0; j < 64; ++j) o[j] *= old[j / 2 % 2];
        pack_weights(s, weights);
        values = at + 1;
      }
      wait_full(values);
      issue_pv<true>(o, weights, descriptor_advance(stage_values, values % kStages * kTileBytes));
      wgmma_wait<0>();
      wgmma_pin(o);
      release(values);
    }
    const TileWork work = shared.work[buffer];
    if (lane == 0) mbarrier_arrive(&shared.query_empty[buffer]);

    if constexpr (kTopk > 0) {
      if (partials) {
        // Maxima and sums of all partial results at once: lane c of a quad reads those of slots c, c + 4, ...
        constexpr int kPerLane = kTopk / 4;
        float2 ml[kPerLane][2];
        const float2* from = p.ws.partial_ml + int64_t{work.partial0 + query * (kTopk - 1)} * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const int slot = min(4 * i + lane % 4, kTopk - 2);
          ml[i][0] = from[slot * 16];
          ml[i][1] = from[slot * 16 + 8];
        }
#pragma unroll 1
        for (int slot = 0; slot < kTopk - 1 && !(slot > 0 && (entry & kLastEntry)); ++slot) {
          wait_full(step);
          entry = __shfl_sync(0xffffffffu, shared.entry[step % kStages], 0);
          float2 mine[2] = {ml[0][0], ml[0][1]};
#pragma unroll
          for (int i = 1; i < kPerLane; ++i) {
            if (slot / 4 == i) mine[0] = ml[i][0], mine[1] = ml[i][1];
          }
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            mine[row].x = __shfl_sync(0xffffffffu, mine[row].x, lane / 4 * 4 + slot % 4);
            mine[row].y = __shfl_sync(0xffffffffu, mine[row].y, lane / 4 * 4 + slot % 4);
          }
          if (wanted()) {
            const char* partial = smem_stages + step % kStages * kTileBytes + query * kPartialBytes;
            add_partial(o, state, reinterpret_cast<const uint4*>(partial), mine, p.scale_log2, lane);
          }
          __syncwarp();
          release(step);
          ++step;
        }
      }
    }
    write_query(p, work, query, o, state, lane);
  }
}

template <int kTopk>
__global__ void __launch_bounds__(kThreads, 1)
    attend_tile_kernel(const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const smem = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const smem_stages = smem + kQueryBuffers * kQueryBytes;
  __shared__ Shared shared;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.query_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (tid < 128) {  // 128 x 40 + 256 x 232 registers: as many as the launch gives, 384 x 168
    registers_decrease<40>();
    if (tid < 32) produce<kTopk>(p, query_map, k_map, v_map, smem, smem_stages, shared, tid);
  } else {
    registers_increase<232>();
    consume<kTopk>(p, smem, smem_stages, shared, tid / 128 - 1, tid / 32, tid % 32);
  }
}

template <int kTopk>
void launch(const AttendCudaArgs& a, int threshold, int chunk, const AttendSizes& sizes, const AttendWorkspace& ws,
            cudaStream_t stream) {
  Params p;
  p.batch = a.batch;
  p.ids_RTK = a.lists;
  p.o_THD = static_cast<__nv_bfloat16*>(a.o_THD);
  p.lse_TH = a.lse_TH;
  p.groups = a.geometry.groups;
  p.threshold = threshold;
  p.chunk = chunk;
  p.chunk_tiles = sizes.chunk_tiles;
  p.scale_log2 = static_cast<float>(a.geometry.logit_scale()) * kLog2e;
  p.ws = ws;
  const auto kernel = attend_tile_kernel<kTopk>;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  kernel<<<sm_count(), kThreads, kSmemBytes, stream>>>(query_map(a, kQueries), kv_map(a, a.k), kv_map(a, a.v), p);
  M3_CUDA_CHECK(cudaGetLastError());
}

void attend_tiles(const AttendCudaArgs& args, int threshold, int chunk, const AttendSizes& sizes,
                  const AttendWorkspace& ws, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (args.support.kind == AttendSupport::Kind::kFull) return launch<0>(args, threshold, chunk, sizes, ws, handle);
  switch (args.geometry.topk) {
    case 4: return launch<4>(args, threshold, chunk, sizes, ws, handle);
    case 8: return launch<8>(args, threshold, chunk, sizes, ws, handle);
    case 16: return launch<16>(args, threshold, chunk, sizes, ws, handle);
    case 32: return launch<32>(args, threshold, chunk, sizes, ws, handle);
    default: M3_FAIL("attend: the Hopper path has topk 4, 8, 16 and 32, got {}", args.geometry.topk);
  }
}

}  // namespace

void attend_sm90(const AttendCudaArgs& args, int threshold, Stream stream) {
  const AttendSizes sizes = attend_sizes(args.geometry, args.batch, threshold);
  const AttendWorkspace ws = attend_make_workspace(args.geometry, args.batch, threshold, args.workspace);
  attend_plan_pairs(args, threshold, sizes, ws, stream);
  for (int chunk = 0; chunk < sizes.num_chunks; ++chunk) {
    if (threshold > 1) attend_rows(args, chunk, sizes, ws, stream);
    attend_tiles(args, threshold, chunk, sizes, ws, stream);
  }
  attend_repair(args, ws.repair, ws.counters + AttendWorkspace::kRepairs, stream);
}

}  // namespace m3
