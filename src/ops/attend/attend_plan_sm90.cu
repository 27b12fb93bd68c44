// Tables of the Hopper prefill attention, all made on the device from device lengths (hopper.md
// §6.3).
//   setup    first tile and first block of every sequence, counters
//   count    which (query, slot) is a pair, and its place among the pairs of its block
//   scan     first pair of every block; items of at most 128 pairs
//   scatter  the pairs, sorted by (chunk, group, block)
// Places within a block come from an atomic counter, so their order differs from run to run;
// results do not, because every pair is computed on its own and merged in list order.
#include <algorithm>

#include "hopper/fence.cuh"
#include "ops/attend/attend_sm90.cuh"
#include "ops/common/cta_scan.cuh"
#include "ops/common/device_workspace.h"

namespace m3 {
namespace {

using namespace attend_sm90_detail;

struct Params {
  MsaBatch batch;
  const int32_t* ids_RTK;
  int groups, threshold, chunk_tiles, num_chunks, max_items, split_units;
  int64_t max_blocks;
  AttendWorkspace ws;
};

__global__ void __launch_bounds__(1024) setup_kernel(const Params p) {
  __shared__ int scratch[32];
  __shared__ int carry[2];
  const int tid = threadIdx.x;
  grid_dependency_launch();  // without pairs the tile kernel's CTAs may take their places
  if (tid < 2) carry[tid] = 0;
  __syncthreads();
  for (int base = 0; base < p.batch.num_seqs; base += 1024) {
    const int n = base + tid;
    int tiles = 0, blocks = 0;
    if (n < p.batch.num_seqs) {
      const MsaSequence s = msa_sequence(p.batch, n);
      tiles = num_tiles(s);
      blocks = (s.k_len + kBlock - 1) / kBlock;
    }
    const int tiles_end = cta_scan_1024(tiles, scratch), blocks_end = cta_scan_1024(blocks, scratch);
    if (n < p.batch.num_seqs) {
      p.ws.tile_begin[n] = carry[0] + tiles_end - tiles;
      p.ws.block_begin[n] = carry[1] + blocks_end - blocks;
    }
    __syncthreads();
    if (tid == 1023) {
      carry[0] += tiles_end;
      carry[1] += blocks_end;
    }
    __syncthreads();
  }
  if (tid == 0) {
    p.ws.tile_begin[p.batch.num_seqs] = carry[0];
    p.ws.block_begin[p.batch.num_seqs] = carry[1];
    p.ws.counters[AttendWorkspace::kTiles] = carry[0];
    p.ws.counters[AttendWorkspace::kRepairs] = 0;
  }
  for (int i = tid; i < 2 * p.num_chunks; i += 1024)
    p.ws.counters[AttendWorkspace::kPerChunk + i] = 0;
  for (int i = tid; i < p.split_units * kQueries; i += 1024) p.ws.parts_done[i] = 0;
}

// A (query, slot) of one tile, as one thread sees it.
struct PairPlace {
  int32_t id, row;     // block, -1: none; query row
  bool history;        // a block other than the own one
  int64_t segment;     // (chunk, group)
  int64_t cell;        // of `position`
  int32_t* block_row;  // row_begin of the sequence's first block
};

template <int kTopk>
__device__ __forceinline__ PairPlace pair_place(const Params& p, int tile, int r) {
  PairPlace place = {-1,
                     0,
                     false,
                     int64_t{tile / p.chunk_tiles} * p.groups + r,
                     (int64_t{tile} * p.groups + r) * (kQueries * kTopk) + threadIdx.x,
                     nullptr};
  const int n = msa_find(p.ws.tile_begin, p.batch.num_seqs, tile);
  const TileRows rows = tile_rows(msa_sequence(p.batch, n), tile - p.ws.tile_begin[n]);
  place.row = rows.row0 + static_cast<int>(threadIdx.x) / kTopk;
  place.block_row = p.ws.row_begin + place.segment * p.max_blocks + p.ws.block_begin[n];
  if (place.row >= rows.begin && place.row < rows.end && rows.position0 >= 0) {
    place.id = p.ids_RTK[(r * p.batch.num_queries + place.row) * kTopk + threadIdx.x % kTopk];
    place.history = place.id >= 0 && place.id != rows.position0 / kBlock;
  }
  return place;
}

// One CTA per (some tiles, group), a thread per (query, slot): several tiles hide each other's
// latency.
constexpr int kTilesPerCta = 4;

template <int kTopk>
__global__ void __launch_bounds__(kQueries* kTopk) count_kernel(const Params p) {
  __shared__ __align__(16) int32_t ids[kTilesPerCta][kQueries][kTopk];
  const int r = blockIdx.y, first = blockIdx.x * kTilesPerCta;
  const int count = min(kTilesPerCta, p.ws.counters[AttendWorkspace::kTiles] - first);
  const int query = threadIdx.x / kTopk, slot = threadIdx.x % kTopk;
  PairPlace place[kTilesPerCta];
#pragma unroll
  for (int i = 0; i < kTilesPerCta; ++i) {
    if (i < count) place[i] = pair_place<kTopk>(p, first + i, r);
  }
#pragma unroll
  for (int i = 0; i < kTilesPerCta; ++i) {
    if (i < count) ids[i][query][slot] = place[i].id;
  }
  __syncthreads();
  int position[kTilesPerCta];
#pragma unroll
  for (int i = 0; i < kTilesPerCta; ++i) {
    position[i] = -1;
    if (i >= count) continue;
    const int id = place[i].id;
    int wanted = 0;  // by how many of the half tile's four queries
    for (int q = query / 4 * 4; q < query / 4 * 4 + 4; ++q) {
      bool found = false;
#pragma unroll
      for (int j = 0; j < kTopk; j += 4) {
        const int4 other = *reinterpret_cast<const int4*>(&ids[i][q][j]);
        found |= other.x == id || other.y == id || other.z == id || other.w == id;
      }
      wanted += found ? 1 : 0;
    }
    if (place[i].history && wanted < p.threshold)
      position[i] = atomicAdd(&place[i].block_row[id], 1);
  }
#pragma unroll
  for (int i = 0; i < kTilesPerCta; ++i) {
    if (i < count) p.ws.position[place[i].cell] = position[i];
  }
}

template <int kTopk>
__global__ void __launch_bounds__(kQueries* kTopk) scatter_kernel(const Params p) {
  const int r = blockIdx.y, first = blockIdx.x * kTilesPerCta;
  const int count = min(kTilesPerCta, p.ws.counters[AttendWorkspace::kTiles] - first);
  const int lane = threadIdx.x % 32, lane0 = lane / kTopk * kTopk, query = threadIdx.x / kTopk;
  const int64_t capacity = int64_t{p.chunk_tiles} * kQueries;
#pragma unroll
  for (int i = 0; i < kTilesPerCta; ++i) {
    if (i >= count) break;
    const int tile = first + i;
    const PairPlace place = pair_place<kTopk>(p, tile, r);
    const int position = p.ws.position[place.cell];
    const uint32_t pairs = __ballot_sync(0xffffffffu, position >= 0);
    if (position < 0) continue;
    // Partial results are ordered by tile, slot (the query's pairs in list order) and query.
    const int order = __popc(pairs >> lane0 & ((1u << (lane - lane0)) - 1));
    const int64_t slot_row = (int64_t{r} * p.chunk_tiles + tile % p.chunk_tiles) * kTopk + order;
    AttendPair* to =
        p.ws.pairs + place.segment * capacity * kTopk + place.block_row[place.id] + position;
    *to = {place.row, static_cast<int32_t>(slot_row * kQueries + query)};
  }
}

// One CTA per (chunk, group).
__global__ void __launch_bounds__(1024) scan_kernel(const Params p) {
  __shared__ int scratch[32];
  __shared__ int carry[2];  // pairs, items
  const int tid = threadIdx.x;
  const int64_t segment = blockIdx.x;
  const int num_blocks = p.ws.block_begin[p.batch.num_seqs];
  int32_t* begins = p.ws.row_begin + segment * p.max_blocks;
  AttendRowsItem* items = p.ws.items + segment * p.max_items;
  if (tid < 2) carry[tid] = 0;
  __syncthreads();
  for (int base = 0; base < num_blocks; base += 1024) {
    const int b = base + tid;
    const int count = b < num_blocks ? begins[b] : 0;
    const int cuts = (count + kAttendRowsPerItem - 1) / kAttendRowsPerItem;
    const int pairs_end = cta_scan_1024(count, scratch), items_end = cta_scan_1024(cuts, scratch);
    const int first_pair = carry[0] + pairs_end - count, first_item = carry[1] + items_end - cuts;
    if (b < num_blocks) begins[b] = first_pair;
    for (int i = 0; i < cuts; ++i) {
      const int done = i * kAttendRowsPerItem;
      items[first_item + i] = {b, first_pair + done, min(kAttendRowsPerItem, count - done)};
    }
    __syncthreads();
    if (tid == 1023) {
      carry[0] += pairs_end;
      carry[1] += items_end;
    }
    __syncthreads();
  }
  if (tid == 0) p.ws.num_items[segment] = carry[1];
}

template <int kTopk>
void launch_pairs(const Params& p, const AttendSizes& sizes, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((sizes.max_tiles + kTilesPerCta - 1) / kTilesPerCta),
                  p.groups);
  const int64_t segments = int64_t{p.num_chunks} * p.groups;
  M3_CUDA_CHECK(cudaMemsetAsync(p.ws.row_begin, 0, segments * p.max_blocks * 4, stream));
  count_kernel<kTopk><<<grid, kQueries * kTopk, 0, stream>>>(p);
  scan_kernel<<<static_cast<unsigned>(segments), 1024, 0, stream>>>(p);
  scatter_kernel<kTopk><<<grid, kQueries * kTopk, 0, stream>>>(p);
}

}  // namespace

AttendSizes attend_sizes(const MsaGeometry& g, const MsaBatch& batch, int threshold, bool split) {
  AttendSizes s;
  s.max_tiles = batch.num_queries / kQueries + 2 * int64_t{batch.num_seqs};
  s.max_blocks = batch.num_seqs * ((batch.max_k_len + kBlock - 1) / kBlock);
  // Without pairs one chunk holds everything. Chunks are of equal size: a short last one would cost
  // two launches.
  const int64_t per_sequence = (batch.max_k_len + kBlock - 1) / kBlock * kAttendChunkPerBlock;
  const int64_t per_chunk =
      std::clamp<int64_t>(per_sequence, kAttendMinChunk, kAttendMaxChunk) / kQueries;
  s.num_chunks =
      threshold > 1
          ? static_cast<int>(std::max<int64_t>(1, (s.max_tiles + per_chunk / 2) / per_chunk))
          : 1;
  s.chunk_tiles = static_cast<int>((s.max_tiles + s.num_chunks - 1) / s.num_chunks);
  const int64_t pairs = int64_t{s.chunk_tiles} * kQueries * g.topk;
  s.max_items = pairs / kAttendRowsPerItem + std::min(pairs, s.max_blocks) + 1;
  s.split_units =
      split ? static_cast<int>(std::min<int64_t>(s.max_tiles * g.groups, kAttendMaxSplitUnits)) : 0;
  return s;
}

AttendWorkspace attend_make_workspace(const MsaGeometry& g, const MsaBatch& batch, int threshold,
                                      bool split, void* base) {
  const AttendSizes s = attend_sizes(g, batch, threshold, split);
  const int64_t segments = int64_t{s.num_chunks} * g.groups,
                capacity = int64_t{s.chunk_tiles} * kQueries;
  const int64_t slots = capacity * g.topk * g.groups;
  AttendWorkspace ws = {};
  char* at = static_cast<char*>(base);
  workspace_take(at, ws.counters, AttendWorkspace::kPerChunk + 2 * s.num_chunks);
  workspace_take(at, ws.tile_begin, batch.num_seqs + 1);
  workspace_take(at, ws.block_begin, batch.num_seqs + 1);
  workspace_take(at, ws.repair, batch.num_queries * g.groups);
  if (threshold > 1) {
    workspace_take(at, ws.position, s.max_tiles * g.groups * kQueries * g.topk);
    workspace_take(at, ws.row_begin, segments * s.max_blocks);
    workspace_take(at, ws.items, segments * s.max_items);
    workspace_take(at, ws.num_items, segments);
    workspace_take(at, ws.pairs, segments * capacity * g.topk);
    workspace_take(at, ws.partial_o, slots * 256);
    workspace_take(at, ws.partial_ml, slots * 16);
  }
  if (split) {
    const int64_t pieces = int64_t{s.split_units + kAttendMaxSms} * kQueries;
    workspace_take(at, ws.parts_done, int64_t{s.split_units} * kQueries);
    workspace_take(at, ws.piece_o, pieces * 256);
    workspace_take(at, ws.piece_ml, pieces * 16);
  }
  ws.end = at;
  return ws;
}

int64_t attend_sm90_workspace_bytes(const MsaGeometry& g, const MsaBatch& batch, int threshold,
                                    bool split) {
  return static_cast<char*>(attend_make_workspace(g, batch, threshold, split, nullptr).end) -
         static_cast<char*>(nullptr);
}

void attend_plan_pairs(const AttendCudaArgs& args, int threshold, const AttendSizes& sizes,
                       const AttendWorkspace& ws, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const Params p = {.batch = args.batch,
                    .ids_RTK = args.lists,
                    .groups = args.geometry.groups,
                    .threshold = threshold,
                    .chunk_tiles = sizes.chunk_tiles,
                    .num_chunks = sizes.num_chunks,
                    .max_items = static_cast<int>(sizes.max_items),
                    .split_units = sizes.split_units,
                    .max_blocks = sizes.max_blocks,
                    .ws = ws};
  setup_kernel<<<1, 1024, 0, handle>>>(p);
  if (threshold > 1) {
    switch (args.geometry.topk) {
      case 4:
        launch_pairs<4>(p, sizes, handle);
        break;
      case 16:
        launch_pairs<16>(p, sizes, handle);
        break;
      default:
        M3_FAIL("attend: the Hopper path has topk 4 and 16, got {}", args.geometry.topk);
    }
  }
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace m3
