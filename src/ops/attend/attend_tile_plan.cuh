// The plan of a tile in attend_tile_sm90.cu, made by one warp one tile ahead: the union of the 8
// lists without their pairs, the order of its blocks (own block, blocks that both warpgroups want,
// then the others in turn, so that neither warpgroup waits for the other), each warpgroup's list;
// and the shared memory of the kernel.
#pragma once
#include "hopper/mbarrier.cuh"
#include "ops/attend/attend_sm90.cuh"

namespace m3::attend_tile_detail {

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

}  // namespace m3::attend_tile_detail
