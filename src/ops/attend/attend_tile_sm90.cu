// Query-outer half of the prefill attention on Hopper (hopper.md §6.4): a tile of 8 neighbouring
// queries of one group (128 rows of 16 heads) runs once through its shared blocks, then adds the
// partial results of its pairs, and writes O and LSE. With all blocks listed it is the dense causal
// kernel.
//
// Persistent, one CTA per SM, tiles handed out in sequence order, one group at a time, so that
// neighbouring tiles find their blocks in L2.
//   warp 0: loads K and V tiles and partial results into the ring, as the plan says.
//   warp 1: plans one tile ahead: forms the union of the 8 lists without their pairs, orders its
//           blocks (own block, blocks that both warpgroups want, then the others in turn, so that
//           neither warpgroup waits for the other), and writes each warpgroup's list.
//   warp 2: loads Q.
//   warpgroups 1, 2: 4 queries each, one warp per query. S = Q K^T of the next block runs together
//           with O += P V of the last one. Blocks that none of the 4 queries wants are given back
//           unused; a warp whose query does not want the block leaves P = 0.
// Shared memory: Q tile 32 KB, 6 stages x 32 KB (K and V in turn, or one partial result of each of
// the 8 queries) = 224 KB; 128-byte swizzle. Work: 4 * 128 * 128 * 128 FLOP per 64 KB of K and V.
#include <algorithm>

#include "hopper/dependent_launch.cuh"
#include "hopper/fence.cuh"
#include "hopper/tma.cuh"
#include "ops/attend/attend_sm90.cuh"

namespace m3 {
namespace {

using namespace attend_sm90_detail;

constexpr int kRows = kQueries * kHeads;
constexpr int kBuffers = 2, kConsumerWarps = 8;
constexpr int kHalfQueryBytes = kRows * 128, kQueryBytes = 2 * kHalfQueryBytes;
constexpr int kPartialBytes = kTileBytes / kQueries;  // bf16 O of one query
constexpr int kThreads = 384, kStages = 6;
// A warpgroup holds the V tile of one block while it waits for the K tile of its next one; with
// more than so many entries between, the ring would stand still.
constexpr int kMaxGap = kStages / 2;

struct Params {
  MsaBatch batch;
  const int32_t* ids_RTK;   // or absent: dense
  const int32_t* position;  // of the plan: not negative for a pair; or absent: no pairs
  __nv_bfloat16* o_THD;
  float* lse_TH;
  int groups, chunk, chunk_tiles;
  float scale_log2;
  AttendWorkspace ws;
};

struct TileWork {
  TileRows rows;
  int32_t seq;
  int32_t group;          // -1: no more work
  int32_t own;            // own block of the tile, -1: a tile of empty rows
  int32_t tail;           // keys of the own block that exist, 1..128
  int64_t partial0;       // partial result of query 0, slot 0; one slot is 8 results
  int32_t first_entry;    // dense: of all blocks, of this piece
  int32_t unit;           // split: (tile, group)
  int32_t parts;          // split: of kAttendTileParts
  int32_t ctas[2];        // split: first and last that have a piece of the unit
  int32_t num_blocks;     // entries of the plan
  int32_t num_wanted[2];  // by warpgroup: of them wanted, and unwanted behind the last wanted one
  int32_t num_behind[2];
  int32_t num_partials;  // most pairs of a query
  int32_t pairs[kQueries];
};

// Entry of a plan: queries that want the block (bits 0..7), own block, block id.
constexpr uint32_t kOwnBlock = 1u << 8;
constexpr int kBlockShift = 9;

// Block of a warpgroup's list: its queries that want it (bits 0..3), flags, entries to skip before
// it.
constexpr uint32_t kWantedOwn = 1u << 4;
constexpr uint32_t kRunEnd = 1u << 5;  // the next one is absent or too far away to overlap with
constexpr int kSkipShift = 6;

struct RingPlace {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <int kTopk>  // 0: dense, whose entries need no list
struct Config {
  static constexpr int kMaxBlocks = kTopk == 0 ? 1 : kQueries * kTopk;
  static constexpr int kMaxWanted = kTopk == 0 ? 1 : kQueries / 2 * kTopk;  // by one warpgroup
};

template <int kTopk>
struct Shared {
  using C = Config<kTopk>;
  alignas(1024) char query[kQueryBytes];
  alignas(1024) char stage[kStages][kTileBytes];
  uint64_t query_full, query_empty;
  uint64_t plan_full[kBuffers], plan_empty[kBuffers];
  uint64_t full[kStages], empty[kStages];
  TileWork work[kBuffers];
  uint32_t entry[kBuffers][C::kMaxBlocks];
  uint16_t wanted[kBuffers][2][C::kMaxWanted + 1];  // one is read ahead
  uint32_t singles[2][C::kMaxWanted];               // the planner's
};

static_assert(sizeof(Shared<16>) <= 232448, "227 KB per CTA");

// The shared ids of the tile's 8 queries in registers, 4 lanes per query.
template <int kTopk>
struct Union {
  static constexpr int kPerLane = kTopk / 4;
  int32_t id[kPerLane];
  int num_pairs;  // of this lane's ids

  __device__ __forceinline__ void load(const Params& p, const TileWork& w, int tile, int lane) {
    const int row = w.rows.row0 + lane / 4;
    const bool live = row >= w.rows.begin && row < w.rows.end && w.own >= 0;
    const int32_t* ids =
        p.ids_RTK + (w.group * p.batch.num_queries + row) * kTopk + lane % 4 * kPerLane;
    const int32_t* position =
        p.position + (int64_t{tile} * p.groups + w.group) * (kQueries * kTopk) + lane * kPerLane;
    num_pairs = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      id[j] = live ? ids[j] : -1;
      const bool pair = p.position != nullptr && position[j] >= 0;
      num_pairs += pair ? 1 : 0;
      if (pair || id[j] < 0) id[j] = kNone;
    }
  }
  __device__ __forceinline__ int lowest() const {
    int low = id[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) low = min(low, id[j]);
    return static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<uint32_t>(low)));
  }
  // Removes block b and returns the queries that share it.
  __device__ __forceinline__ uint32_t take(int b) {
    bool mine = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      mine |= id[j] == b;
      if (id[j] == b) id[j] = kNone;
    }
    uint32_t x = __ballot_sync(0xffffffffu, mine);
    x |= x >> 1;
    x = (x | x >> 2) & 0x11111111u;  // bit 4q: any of query q's lanes
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    return (x | x >> 12) & 0xffu;
  }
};

// Fills the lists and the counts of `work` for parts [first_part, first_part + work.parts) of a
// tile with lists.
template <int kTopk, bool kSplit>
__device__ __forceinline__ void plan_blocks(const Params& p, TileWork& work, int tile,
                                            int first_part, int buffer, Shared<kTopk>& shared,
                                            int lane) {
  uint32_t* entry = shared.entry[buffer];
  Union<kTopk> ids;
  ids.load(p, work, tile, lane);
  int num_both = 0, num_single[2] = {0, 0};
  if (work.own >= 0) {
    const uint32_t mask = ids.take(work.own);
    if (mask != 0) {
      if (lane == 0) entry[0] = mask | kOwnBlock | static_cast<uint32_t>(work.own) << kBlockShift;
      num_both = 1;
    }
  }
  for (int b = ids.lowest(); b != kNone; b = ids.lowest()) {
    const uint32_t mask = ids.take(b);
    const uint32_t word = mask | static_cast<uint32_t>(b) << kBlockShift;
    const bool first = mask & 0x0f, second = mask & 0xf0;
    if (first && second) {
      if (lane == 0) entry[num_both] = word;
      ++num_both;
    } else {
      if (lane == 0) shared.singles[first ? 0 : 1][first ? num_single[0] : num_single[1]] = word;
      num_single[0] += first ? 1 : 0;
      num_single[1] += first ? 0 : 1;
    }
  }
  __syncwarp();
  const int paired = min(num_single[0], num_single[1]);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    for (int i = lane; i < num_single[which]; i += 32) {
      entry[num_both + (i < paired ? 2 * i + which : paired + i)] = shared.singles[which][i];
    }
  }
  __syncwarp();
  work.num_blocks = num_both + num_single[0] + num_single[1];
  if constexpr (kSplit) {
    const AttendListCut cut = {num_both, paired, num_single[0] + num_single[1] - 2 * paired};
    const int first = cut.entry(first_part);
    work.num_blocks = cut.entry(first_part + work.parts) - first;
    for (int base = 0; base < work.num_blocks; base += 32) {  // down to the list's begin
      const bool moves = base + lane < work.num_blocks;
      const uint32_t word = moves ? entry[first + base + lane] : 0;
      __syncwarp();
      if (moves) entry[base + lane] = word;
      __syncwarp();
    }
  }
  int done[2] = {0, 0};  // entries up to the last wanted one
  for (int base = 0; base < work.num_blocks; base += 32) {
    const uint32_t word = base + lane < work.num_blocks ? entry[base + lane] : 0;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t queries = word >> (4 * which) & 0xf;
      const uint32_t lanes = __ballot_sync(0xffffffffu, queries != 0);
      const uint32_t later = lanes >> lane >> 1, earlier = lanes & ((1u << lane) - 1);
      if (queries != 0) {
        const bool end = later == 0 || __ffs(static_cast<int>(later)) > kMaxGap;
        const int skips =
            base + lane -
            (earlier == 0 ? done[which] : base + 32 - __clz(static_cast<int>(earlier)));
        shared.wanted[buffer][which][work.num_wanted[which] + __popc(earlier)] =
            static_cast<uint16_t>(queries | (word & kOwnBlock ? kWantedOwn : 0u) |
                                  (end ? kRunEnd : 0u) |
                                  static_cast<uint32_t>(skips) << kSkipShift);
      }
      work.num_wanted[which] += __popc(lanes);
      if (lanes != 0) done[which] = base + 32 - __clz(static_cast<int>(lanes));
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) work.num_behind[which] = work.num_blocks - done[which];
  int pairs = ids.num_pairs + __shfl_xor_sync(0xffffffffu, ids.num_pairs, 1);
  pairs += __shfl_xor_sync(0xffffffffu, pairs, 2);
#pragma unroll
  for (int q = 0; q < kQueries; ++q) work.pairs[q] = __shfl_sync(0xffffffffu, pairs, 4 * q);
  work.num_partials =
      static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(pairs)));
}

template <int kTopk, bool kSplit>
__device__ __forceinline__ void plan_tiles(const Params& p, Shared<kTopk>& shared, int lane) {
  const int first_tile = p.chunk * p.chunk_tiles;
  const int tiles = max(0, min(p.chunk_tiles, p.ws.counters[AttendWorkspace::kTiles] - first_tile));
  int32_t* next_unit = p.ws.counters + AttendWorkspace::kPerChunk + 2 * p.chunk;
  const AttendShares shares(kSplit ? max(1, tiles * p.groups) : 1,
                            static_cast<int>(gridDim.x));
  const int cta = static_cast<int>(blockIdx.x);
  int part = kSplit ? shares.begin(cta) : 0;
  const int end_part = !kSplit || tiles == 0 ? part : shares.begin(cta + 1);
  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    TileWork work = {};
    work.group = -1;
    int unit = 0;
    const int first_part = part % kAttendTileParts;
    if constexpr (kSplit) {
      unit = part < end_part ? part / kAttendTileParts : tiles * p.groups;
      work.unit = unit;
      work.parts = min(kAttendTileParts - first_part, end_part - part);
      work.ctas[0] = shares.owner(part - first_part);
      work.ctas[1] = shares.owner(part - first_part + kAttendTileParts - 1);
      part += work.parts;
    } else {
      if (lane == 0) unit = atomicAdd(next_unit, 1);
      unit = __shfl_sync(0xffffffffu, unit, 0);
    }
    // Dense tiles grow with the position: longest first. Sparse ones follow the sequence.
    const int tile = kTopk == 0 ? tiles - 1 - unit / p.groups : unit % max(1, tiles);
    if (unit < tiles * p.groups) {
      work.group = kTopk == 0 ? unit % p.groups : unit / tiles;
      work.seq = msa_find(p.ws.tile_begin, p.batch.num_seqs, first_tile + tile);
      const MsaSequence seq = msa_sequence(p.batch, work.seq);
      work.rows = tile_rows(seq, first_tile + tile - p.ws.tile_begin[work.seq]);
      work.partial0 =
          kTopk == 0 ? 0 : (int64_t{work.group} * p.chunk_tiles + tile) * kTopk * kQueries;
      work.own = work.rows.position0 < 0 ? -1 : work.rows.position0 / kBlock;
      work.tail = min(kBlock, seq.k_len - work.own * kBlock);
    }
    mbarrier_wait(&shared.plan_empty[buffer], (round / kBuffers & 1) ^ 1);
    if constexpr (kTopk == 0) {
      int count = work.own + 1;
      if constexpr (kSplit) {
        const AttendListCut cut = {count, 0, 0};
        work.first_entry = cut.entry(first_part);
        count = cut.entry(first_part + work.parts) - work.first_entry;
      }
      work.num_blocks = work.num_wanted[0] = work.num_wanted[1] = count;
    } else if (work.group >= 0) {
      plan_blocks<kTopk, kSplit>(p, work, first_tile + tile, first_part, buffer, shared, lane);
    }
    if (lane == 0) shared.work[buffer] = work;
    mbarrier_arrive(&shared.plan_full[buffer]);
    if (work.group < 0) return;
  }
}

// The i-th entry of a plan. Dense: the own block first, so that every row has a finite maximum from
// then on.
template <int kTopk, bool kSplit>
__device__ __forceinline__ uint32_t plan_entry(const Shared<kTopk>& shared, int buffer, int i) {
  if constexpr (kTopk > 0) return shared.entry[buffer][i];
  const int own = shared.work[buffer].own;
  const int at = kSplit ? shared.work[buffer].first_entry + i : i;
  return 0xff | (at == 0 ? kOwnBlock | static_cast<uint32_t>(own) << kBlockShift
                         : static_cast<uint32_t>(at - 1) << kBlockShift);
}

// The i-th block of a warpgroup's list of `count`.
template <int kTopk, bool kSplit>
__device__ __forceinline__ uint32_t wanted_block(const Shared<kTopk>& shared, int buffer,
                                                 int consumer, int i, int count) {
  if constexpr (kTopk > 0) return shared.wanted[buffer][consumer][i];
  const int at = kSplit ? shared.work[buffer].first_entry + i : i;
  return 0xf | (at == 0 ? kWantedOwn : 0u) | (i + 1 == count ? kRunEnd : 0u);
}

template <int kTopk>
__device__ __forceinline__ void load_queries(const CUtensorMap& query_map, Shared<kTopk>& shared) {
  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    mbarrier_wait(&shared.plan_full[buffer], round / kBuffers & 1);
    const int group = shared.work[buffer].group, row = shared.work[buffer].rows.row0;
    mbarrier_arrive(&shared.plan_empty[buffer]);
    if (group < 0) return;
    mbarrier_wait(&shared.query_empty, (round & 1) ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(&shared.query_full, kQueryBytes);
      tma_load(shared.query, &query_map, &shared.query_full, 0, group * kHeads, row);
      tma_load(shared.query + kHalfQueryBytes, &query_map, &shared.query_full, 64, group * kHeads,
               row);
    }
    __syncwarp();
  }
}

template <int kTopk, bool kSplit>
__device__ __forceinline__ void load_tiles(const Params& p, const CUtensorMap& k_map,
                                           const CUtensorMap& v_map, Shared<kTopk>& shared,
                                           int lane) {
  int stage = 0, phase = 1;                // of the empty barriers
  const auto open = [&](uint32_t bytes) {  // every lane waits: any may issue a copy
    mbarrier_wait(&shared.empty[stage], phase);
    if (lane == 0) mbarrier_arrive_expect_tx(&shared.full[stage], bytes);
  };
  const auto close = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };
  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    mbarrier_wait(&shared.plan_full[buffer], round / kBuffers & 1);
    const TileWork& work = shared.work[buffer];
    const int group = work.group;
    if (group < 0) return;
    const MsaSequence seq = msa_sequence(p.batch, work.seq);
    const int num_blocks = work.num_blocks;
    // Page numbers are read 32 at a time.
    for (int base = 0; base < num_blocks; base += 32) {
      KvPlace mine = {0, 0};
      if (base + lane < num_blocks) {
        mine = kv_place(p.batch, seq,
                        static_cast<int>(plan_entry<kTopk, kSplit>(shared, buffer, base + lane) >>
                                         kBlockShift));
      }
      for (int i = 0; i < min(32, num_blocks - base); ++i) {
        const int token = __shfl_sync(0xffffffffu, mine.token, i),
                  page = __shfl_sync(0xffffffffu, mine.page, i);
        open(kTileBytes);
        if (lane == 0) {
          tma_load(shared.stage[stage], &k_map, &shared.full[stage], 0, token, group, page);
          tma_load(shared.stage[stage] + kHalfBytes, &k_map, &shared.full[stage], 64, token, group,
                   page);
        }
        close();
        open(kTileBytes);
        if (lane == 0) {
          tma_load(shared.stage[stage], &v_map, &shared.full[stage], 0, token, group, page);
          tma_load(shared.stage[stage] + kHalfBytes, &v_map, &shared.full[stage], 64, token, group,
                   page);
        }
        close();
        __syncwarp();
      }
    }
    // First maxima and sums of all slots, then the partial results of one slot after another:
    // neighbouring queries lie side by side, a copy per run of queries that have it.
    const int pairs = lane < kQueries ? work.pairs[lane] : 0, num_partials = work.num_partials;
    const int64_t partial0 = work.partial0;
    mbarrier_arrive(&shared.plan_empty[buffer]);
    if (num_partials > 0) {
      const uint32_t bytes = num_partials * kQueries * kHeads * sizeof(float2);
      open(bytes);
      if (lane == 0)
        bulk_load(shared.stage[stage], p.ws.partial_ml + partial0 * kHeads, bytes,
                  &shared.full[stage]);
      close();
      __syncwarp();
    }
    for (int slot = 0; slot < num_partials; ++slot) {
      const uint32_t queries = __ballot_sync(0xffffffffu, slot < pairs);
      open(__popc(queries) * kPartialBytes);
      __syncwarp();
      if ((queries & ~(queries << 1)) >> lane & 1) {
        const int run = __ffs(~(queries >> lane)) - 1;
        bulk_load(shared.stage[stage] + lane * kPartialBytes,
                  p.ws.partial_o + (partial0 + slot * kQueries + lane) * 256, run * kPartialBytes,
                  &shared.full[stage]);
      }
      close();
      __syncwarp();
    }
  }
}

struct RowState {
  float maximum[2] = {
      -INFINITY, -INFINITY};  // of the raw logits, rows lane / 4 and lane / 4 + 8; see softmax_step
  float sum[2] = {0, 0};      // of this lane's columns
};

// Turns logits into weights in place. The reference point of the exponentials follows the true
// maximum only when a weight would pass 2^kSlack; until then nothing that was summed before has to
// be scaled. Returns true if it did; then `old` holds the factors.
constexpr float kSlack = 8;

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

// kExact: the true maxima, for a row that may have nothing summed yet.
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

// Writes O and LSE of one warp's query (16 rows of 128 channels) and reports non-finite rows.
__device__ __forceinline__ void write_query(const Params& p, const TileWork& work, int query,
                                            const float (&o)[64], const RowState& state, int lane) {
  const int row = work.rows.row0 + query;
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
        const float x = o[4 * (j + i) + 2 * half] * inverse,
                    y = o[4 * (j + i) + 2 * half + 1] * inverse;
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

// Writes this warp's piece of a split query. True in the warp that is the query's last: then o and
// state have become the sum of all pieces, in the order of the list.
__device__ __forceinline__ bool join_pieces(const Params& p, const TileWork& work, int query,
                                            float (&o)[64], RowState& state, int lane) {
  const int piece = (work.unit + static_cast<int>(blockIdx.x)) * kQueries + query;
  store_partial(p.ws.piece_o, p.ws.piece_ml, piece, o, state.maximum, state.sum, lane);
  __threadfence();
  __syncwarp();
  int done = 0;
  if (lane == 0)
    done = atomicAdd(&p.ws.parts_done[work.unit * kQueries + query], work.parts) + work.parts;
  if (__shfl_sync(0xffffffffu, done, 0) < kAttendTileParts) return false;
  __threadfence();

  // All maxima are on their way together, and each piece while the one before is added.
  constexpr int kMost = kAttendTileParts / 2 + 1;  // pieces of a unit
  const int64_t first = int64_t{work.unit + work.ctas[0]} * kQueries + query;
  const int count = work.ctas[1] - work.ctas[0] + 1;
  float2 ml[kMost][2];
  float weight[kMost][2];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2* from = p.ws.piece_ml + (first + i * kQueries) * kHeads + lane / 4 + 8 * row;
      ml[i][row] = i < count ? __ldcg(from) : make_float2(-INFINITY, 0);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kMost; ++i) top = fmaxf(top, ml[i][row].x);
    state.maximum[row] = top;
    state.sum[row] = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {  // -inf: no block of the piece was the query's
      weight[i][row] =
          ml[i][row].x == -INFINITY ? 0.0f : exp2_approx((ml[i][row].x - top) * p.scale_log2);
      if (lane % 4 == 0) state.sum[row] = fmaf(ml[i][row].y, weight[i][row], state.sum[row]);
    }
  }
#pragma unroll
  for (int j = 0; j < 64; ++j) o[j] = 0;
  uint4 next[8];
  const auto fetch = [&](int i) {
#pragma unroll
    for (int word = 0; word < 8; ++word)
      next[word] = __ldcg(p.ws.piece_o + (first + i * kQueries) * 256 + word * 32 + lane);
  };
  fetch(0);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= count) break;
    uint4 words[8];
#pragma unroll
    for (int word = 0; word < 8; ++word) words[word] = next[word];
    if (i + 1 < count) fetch(i + 1);
    add_partial(o, [&](int word) { return words[word]; }, weight[i]);
  }
  return true;
}

// Values behind the sequence's end become zeros: their weights are 0, but 0 x NaN is not. Both
// warpgroups do it for themselves and write the same. Only the lanes that later give the stage back
// write, so that racecheck can follow the hand-over; at most 16 tiles of a sequence have a tail.
__device__ __forceinline__ void clear_tail(char* values, int tail, int consumer) {
  if (threadIdx.x % 32 == 0) {
    for (int i = threadIdx.x / 32 % 4; i < (kBlock - tail) * 16; i += 4) {
      const int row = tail + i / 16, half = i / 8 % 2;
      *reinterpret_cast<uint4*>(values + half * kHalfBytes + row * 128 + i % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
  }
  named_barrier_sync(1 + consumer, 128);
}

template <int kTopk, bool kSplit>
__device__ __forceinline__ void consume(const Params& p, Shared<kTopk>& shared, int consumer,
                                        int warp, int lane) {
  const int query = consumer * 4 + warp % 4;  // of the tile
  const uint64_t query_rows = descriptor_k_major(shared.query + consumer * 64 * 128);
  const uint64_t stage_keys = descriptor_k_major(shared.stage[0]);
  const uint64_t stage_values = descriptor_mn_major(shared.stage[0], kHalfBytes);
  const auto wait_full = [&](RingPlace at) { mbarrier_wait(&shared.full[at.stage], at.parity); };
  const auto release = [&](RingPlace at) {
    if (lane == 0) mbarrier_arrive(&shared.empty[at.stage]);
  };
  const auto tile_of = [](uint64_t descriptor, RingPlace at) {
    return descriptor_advance(descriptor, at.stage * kTileBytes);
  };

  RingPlace cursor;                   // the next stage of the ring
  const auto skip = [&](int count) {  // entries, of two stages each
    for (int i = 0; i < 2 * count; ++i) {
      wait_full(cursor);
      release(cursor);
      cursor.advance();
    }
  };
  const auto take = [&] {
    const RingPlace place = cursor;
    cursor.advance();
    return place;
  };

  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    mbarrier_wait(&shared.plan_full[buffer], round / kBuffers & 1);
    const TileWork& work = shared.work[buffer];
    if (__shfl_sync(0xffffffffu, work.group, 0) < 0) return;
    const int num_wanted = __shfl_sync(0xffffffffu, work.num_wanted[consumer], 0);
    mbarrier_wait(&shared.query_full, round & 1);

    RowState state;
    float o[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) o[j] = 0;
    uint32_t weights[8][4];
    float s[64], old[2];
    int index = 0;      // of the next block
    uint32_t word = 0;  // the block at work
    uint32_t ahead = wanted_block<kTopk, kSplit>(shared, buffer, consumer, 0, num_wanted);
    RingPlace keys, values;  // of the block at work
    const auto take_next = [&] {
      word = __shfl_sync(0xffffffffu, ahead, 0);
      ahead = wanted_block<kTopk, kSplit>(shared, buffer, consumer, ++index, num_wanted);
      skip(static_cast<int>(word >> kSkipShift));
      keys = take();
    };
    const auto wanted = [&] { return (word >> warp % 4 & 1) != 0; };  // by this warp's query
    const auto rescale = [&] {
#pragma unroll
      for (int j = 0; j < 64; ++j) o[j] *= old[j / 2 % 2];
    };
    const auto pack = [&] { pack_weights(s, weights, wanted() ? 0xffffffffu : 0u); };

    while (index < num_wanted) {
      take_next();
      values = take();
      wait_full(keys);
      issue_qk<kHalfQueryBytes>(s, query_rows, tile_of(stage_keys, keys));
      wgmma_wait<0>();
      wgmma_pin(s);
      release(keys);
      // The only block that a row may see in part, or that may be incomplete.
      if (word & kWantedOwn) {
        const int tail = work.tail;
        if (tail < kBlock) {
          wait_full(values);
          clear_tail(shared.stage[values.stage], tail, consumer);
        }
        const int limit = work.rows.position0 % kBlock + query;  // last visible column
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          if (8 * (j / 4) + 2 * (lane % 4) + j % 2 > limit) s[j] = -INFINITY;
        }
      }
      if (wanted() && softmax_step<true>(s, state, old, p.scale_log2)) rescale();
      pack();
      while ((word & kRunEnd) == 0) {
        const RingPlace last = values;
        take_next();  // here: control flow while products run would make ptxas serialise them
        values = take();
        wait_full(last);
        wait_full(keys);
        issue_qk<kHalfQueryBytes>(s, query_rows, tile_of(stage_keys, keys));
        issue_pv<true>(o, weights, tile_of(stage_values, last));
        wgmma_wait<1>();
        wgmma_pin(s);
        release(keys);
        const bool moved = wanted() && softmax_step<false>(s, state, old, p.scale_log2);
        wgmma_wait<0>();
        wgmma_pin(o);
        release(last);
        if (moved) rescale();
        pack();
      }
      if (index == num_wanted && lane == 0) mbarrier_arrive(&shared.query_empty);
      wait_full(values);
      issue_pv<true>(o, weights, tile_of(stage_values, values));
      wgmma_wait<0>();
      wgmma_pin(o);
      release(values);
    }
    if constexpr (kTopk > 0) skip(__shfl_sync(0xffffffffu, work.num_behind[consumer], 0));
    if (num_wanted == 0 && lane == 0) mbarrier_arrive(&shared.query_empty);

    if constexpr (kTopk > 0 && !kSplit) {
      const int num_partials = work.num_partials, pairs = work.pairs[query];
      if (num_partials > 0) {
        constexpr int kPerLane = kTopk / 4;
        float weight[kPerLane][2];
        const auto pass = [&] {
          __syncwarp();
          release(cursor);
          cursor.advance();
        };
        wait_full(cursor);
        if (pairs > 0) {
          const float2* ml = reinterpret_cast<const float2*>(shared.stage[cursor.stage]) +
                             query * kHeads + lane / 4;
          weigh_partials<kPerLane>(weight, ml, pairs, o, state, p.scale_log2, lane);
        }
        pass();
#pragma unroll 1
        for (int slot = 0; slot < num_partials; ++slot) {
          wait_full(cursor);
          if (slot < pairs) {
            float mine[2] = {weight[0][0], weight[0][1]};
#pragma unroll
            for (int i = 1; i < kPerLane; ++i) {
              if (slot / 4 == i) mine[0] = weight[i][0], mine[1] = weight[i][1];
            }
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              mine[row] = __shfl_sync(0xffffffffu, mine[row], lane / 4 * 4 + slot % 4);
            }
            const char* partial = shared.stage[cursor.stage] + query * kPartialBytes;
            const uint4* from = reinterpret_cast<const uint4*>(partial) + lane;
            add_partial(o, [&](int word) { return from[word * 32]; }, mine);
          }
          pass();
        }
      }
    }
    const int row = work.rows.row0 + query;
    const bool live = row >= work.rows.begin && row < work.rows.end;
    bool complete = live;
    if constexpr (kSplit) {
      if (live && work.parts < kAttendTileParts)
        complete = join_pieces(p, work, query, o, state, lane);
    }
    if (complete) write_query(p, work, query, o, state, lane);
    mbarrier_arrive(&shared.plan_empty[buffer]);
  }
}

template <int kTopk, bool kSplit>
__global__ void __launch_bounds__(kThreads, 1)
    attend_tile_kernel(const __grid_constant__ CUtensorMap query_map,
                       const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map,
                       const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  Shared<kTopk>& shared = *reinterpret_cast<Shared<kTopk>*>(smem);
  const int tid = threadIdx.x;
  if (tid == 0) {
    if (smem_address(smem) % 1024 != 0) __trap();  // no static shared memory lies before it
    mbarrier_init(&shared.query_full, 1);
    mbarrier_init(&shared.query_empty, kConsumerWarps);
    for (int i = 0; i < kBuffers; ++i) {  // every lane arrives: plans are ordinary memory
      mbarrier_init(&shared.plan_full[i], 32);
      mbarrier_init(&shared.plan_empty[i], 32 * (kConsumerWarps + 2));
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  if (tid < 128) {  // 128 x 56 + 256 x 224 registers: as many as the launch gives, 384 x 168
    registers_decrease<56>();
    if (tid < 32) {
      load_tiles<kTopk, kSplit>(p, k_map, v_map, shared, tid);
    } else if (tid < 64) {
      plan_tiles<kTopk, kSplit>(p, shared, tid - 32);
    } else if (tid < 96) {
      load_queries<kTopk>(query_map, shared);
    }
  } else {
    registers_increase<224>();
    consume<kTopk, kSplit>(p, shared, tid / 128 - 1, tid / 32, tid % 32);
  }
}

template <int kTopk, bool kSplit>
void launch(const AttendCudaArgs& a, int threshold, int chunk, const AttendSizes& sizes,
            const AttendWorkspace& ws, cudaStream_t stream) {
  Params p;
  p.batch = a.batch;
  p.ids_RTK = a.lists;
  p.o_THD = static_cast<__nv_bfloat16*>(a.o_THD);
  p.lse_TH = a.lse_TH;
  p.groups = a.geometry.groups;
  p.position = threshold > 1 ? ws.position : nullptr;
  p.chunk = chunk;
  p.chunk_tiles = sizes.chunk_tiles;
  p.scale_log2 = static_cast<float>(a.geometry.logit_scale()) * kLog2e;
  p.ws = ws;
  const auto kernel = attend_tile_kernel<kTopk, kSplit>;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     sizeof(Shared<kTopk>)));
  const int ctas = kSplit ? std::min(sm_count(), kAttendMaxSms) : sm_count();
  launch_dependent(kernel, ctas, kThreads, sizeof(Shared<kTopk>), stream, query_map(a, kQueries),
                   kv_map(a, a.k), kv_map(a, a.v), p);
}

template <bool kSplit>
void attend_tiles(const AttendCudaArgs& args, int threshold, int chunk, const AttendSizes& sizes,
                  const AttendWorkspace& ws, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (args.support.kind == AttendSupport::Kind::kFull)
    return launch<0, kSplit>(args, threshold, chunk, sizes, ws, handle);
  switch (args.geometry.topk) {
    case 4:
      return launch<4, kSplit>(args, threshold, chunk, sizes, ws, handle);
    case 16:
      return launch<16, kSplit>(args, threshold, chunk, sizes, ws, handle);
    default:
      M3_FAIL("attend: the Hopper path has topk 4 and 16, got {}", args.geometry.topk);
  }
}

}  // namespace

void attend_sm90(const AttendCudaArgs& args, int threshold, bool split, Stream stream) {
  const AttendSizes sizes = attend_sizes(args.geometry, args.batch, threshold, split);
  M3_CHECK(!split || (threshold == 1 && sizes.max_tiles * args.geometry.groups <= sizes.split_units),
           "attend: {} tiles x {} groups with threshold {} cannot be split, want at most {} of them "
           "and threshold 1",
           sizes.max_tiles, args.geometry.groups, threshold, kAttendMaxSplitUnits);
  const AttendWorkspace ws =
      attend_make_workspace(args.geometry, args.batch, threshold, split, args.workspace);
  attend_plan_pairs(args, threshold, sizes, ws, stream);
  for (int chunk = 0; chunk < sizes.num_chunks; ++chunk) {
    if (threshold > 1) attend_rows(args, chunk, sizes, ws, stream);
    const auto tiles = split ? attend_tiles<true> : attend_tiles<false>;
    tiles(args, threshold, chunk, sizes, ws, stream);
  }
  attend_repair(args, ws.repair, ws.counters + AttendWorkspace::kRepairs, stream);
}

}  // namespace m3
