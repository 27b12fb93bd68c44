// The Hopper prefill kernels of attend (hopper.md §5, §6.3, §6.4) and the workspace they share.
// Fast geometry: G = 16, D = B = 128, bf16, K = 4 or 16.
//
// A tile is 8 consecutive positions of one sequence, aligned to 8. Two ways for a selected block:
//   shared  the tile kernel multiplies it with the 4 queries of a half tile at once; rows of
//           queries that did not select it are masked;
//   pair    the rows kernel gathers all queries that selected the block, and writes per pair an
//           unnormalised O (bf16) with its maximum and sum; the tile kernel adds these up in list
//           order.
// A history block is shared within a half tile if at least `threshold` of its 4 queries selected
// it. threshold 1: everything shared, no pairs and no plan (design C). 3: hybrid (H). 5: history
// only as pairs (E).
//
// Split: a few hundred queries on a long cache are more tiles than SMs, but not many more, and the
// last wave of whole tiles would leave most SMs idle. Then every CTA gets an equal share of all
// tiles, in parts of 1 / kAttendTileParts of a tile's list; a piece of a tile writes its
// unnormalised O, and the warp that finishes a query last adds up its pieces in list order.
#pragma once
#include "ops/attend/attend_cuda.h"
#include "ops/attend/attend_split.h"

namespace m3 {

constexpr int kAttendTileQueries = 8;
constexpr int kAttendRowsPerItem = 128;  // pairs of one block that a CTA takes at a time
// Partial results exist for a chunk of queries at a time: about 16 queries per block of the longest
// sequence within these limits (the more queries, the fewer times a block is read), 270 KB a query
// of M3's geometry.
constexpr int kAttendMinChunk = 8192, kAttendMaxChunk = 32768, kAttendChunkPerBlock = 16;

// One row (query, group) whose O came out non-finite: a NaN that the row does not see met a weight
// of zero, or one that it does see. The general path computes those rows again, exactly as visible.
struct AttendRepairRow {
  int32_t query, group;
};

struct AttendRowsItem {
  int32_t block;         // index among the blocks of all sequences (block_begin)
  int32_t begin, count;  // pairs
};

struct AttendPair {
  int32_t query;    // row of q_THD
  int32_t partial;  // index of partial_o and partial_ml
};

// Device pointers into the caller's workspace. The second part exists only with a threshold
// above 1.
struct AttendWorkspace {
  int32_t* counters;        // kCount..; then per chunk: next tile, next item
  int32_t* tile_begin;      // [N + 1]
  int32_t* block_begin;     // [N + 1]
  AttendRepairRow* repair;  // [T * R]

  int32_t* position;      // [tiles, R, 8, K]: place of the pair among its block's; -1: no pair
  int32_t* row_begin;     // [chunks, R, blocks]: counts, then first pair of a block
  AttendRowsItem* items;  // [chunks, R, max_items]
  int32_t* num_items;     // [chunks, R]
  AttendPair* pairs;      // [chunks, R, chunk * K]
  uint4* partial_o;       // [R, tiles of a chunk, K, 8, 256]: accumulator order, 16 bytes per lane
  float2* partial_ml;     // [R, tiles of a chunk, K, 8, 16]: maximum of the raw logits, sum

  int32_t* parts_done;  // [units, 8]: only with `split`; parts of a query's list that are written
  uint4* piece_o;       // [units + SMs, 8, 256]: as partial_o; a piece has the place unit + CTA
  float2* piece_ml;     // [units + SMs, 8, 16]
  void* end;            // of the workspace

  enum Counter { kTiles, kRepairs, kPerChunk };
};

// Sizes from the host's bounds.
struct AttendSizes {
  int64_t max_tiles, max_blocks,
      max_items;  // of the call; blocks of all sequences; items of a (chunk, group)
  int chunk_tiles, num_chunks;
  int split_units;  // most (tile, group)s of a split call; 0: not split
};
AttendSizes attend_sizes(const MsaGeometry& geometry, const MsaBatch& batch, int threshold,
                         bool split);
int64_t attend_sm90_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch,
                                    int threshold, bool split);
AttendWorkspace attend_make_workspace(const MsaGeometry& geometry, const MsaBatch& batch,
                                      int threshold, bool split, void* base);

// kBlocks with a threshold from 1 to 5, or kFull (threshold 1). `split`: threshold 1 and at most
// kAttendMaxSplitUnits.
void attend_sm90(const AttendCudaArgs& args, int threshold, bool split, Stream stream);

// Steps of attend_sm90.
void attend_plan_pairs(const AttendCudaArgs& args, int threshold, const AttendSizes& sizes,
                       const AttendWorkspace& ws, Stream stream);
void attend_rows(const AttendCudaArgs& args, int chunk, const AttendSizes& sizes,
                 const AttendWorkspace& ws, Stream stream);
// Recomputes the listed rows on the general path; `count` lies on the device.
void attend_repair(const AttendCudaArgs& args, const AttendRepairRow* rows, const int32_t* count,
                   Stream stream);

}  // namespace m3
