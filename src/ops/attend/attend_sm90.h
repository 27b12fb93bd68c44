// The Hopper prefill kernels of attend (hopper.md §6.4) and the workspace they share. Fast geometry:
// G = 16, D = B = 128, bf16, K = 4, 8, 16 or 32.
#pragma once
#include "ops/attend/attend_cuda.h"

namespace m3 {

// A tile is 8 consecutive positions of one sequence, aligned to 8, and one group: 128 rows of (query, head).
constexpr int kAttendTileQueries = 8;

// One row (query, group) whose O came out non-finite: a NaN that the row does not see met a weight of zero,
// or one that it does see. The general path computes those rows again, exactly as visible.
struct AttendRepairRow {
  int32_t query, group;
};

struct AttendTileWorkspace {
  int32_t* counters;      // 0: tiles, 1: next tile, 2: rows to repair
  int32_t* unit_begin;    // [N + 1] first tile of a sequence
  AttendRepairRow* repair;  // [T * R]
};
int64_t attend_tile_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch);

// Query-outer: every tile runs through the blocks that any of its queries wants.
void attend_tile_sm90(const AttendCudaArgs& args, Stream stream);

// Recomputes the listed rows on the general path; `count` lies on the device.
void attend_repair(const AttendCudaArgs& args, const AttendRepairRow* rows, const int32_t* count, Stream stream);

}  // namespace m3
