// attend for a decode step on Hopper: up to 16 query tokens per sequence against a paged cache,
// over selected blocks or over all keys (first layers). Contract of the results: attend.h, msa.md
// §5-§6; design: hopper.md §6.6.
//
// Where the blocks of a row come from:
//   ids_RTK                 kBlocks with finished lists (any order that attend.h allows), or
//   scores_TRM              the block scores of index_decode_scores: the kernel chooses itself,
//                           one query token per sequence, and writes ids_RTK if present; or
//   neither                 all keys (kFull).
//
// bf16, D = B = 128, G <= 16, K <= 32; attend_decode_supports names what is outside. A cluster of
// CTAs shares one (sequence, up to four query tokens, group); partial results meet in distributed
// shared memory in a fixed order. Bits depend on `cluster` and `splits` and on the row's own
// inputs, not on the batch. Lengths, cu_q and page tables are read from device memory. Rows without
// keys: O = 0, LSE = -inf, ids -1.
#pragma once
#include <string>

#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

struct AttendDecodeParams {
  const void* q_THD = nullptr;   // bf16
  const void* k_PRBD = nullptr;  // bf16 pages
  const void* v_PRBD = nullptr;
  int64_t num_pages = 0;
  void* o_THD = nullptr;              // bf16
  float* lse_TH = nullptr;            // may be absent
  const int32_t* cu_q = nullptr;      // [num_seqs + 1]
  const int32_t* seq_lens = nullptr;  // [num_seqs]
  const int32_t* page_table = nullptr;
  int64_t page_stride = 0;
  int num_seqs = 0;
  int groups = 0;
  int heads_per_group = 0;
  int topk = 0;
  int64_t num_queries = 0;
  float scale_log2 = 0;  // logit scale x log2(e)
  const float* scores_TRM = nullptr;
  int64_t score_stride = 0;
  int32_t* ids_RTK = nullptr;  // read, or written where scores_TRM is given
  float* partial = nullptr;    // workspace of attend_decode_workspace_bytes, with splits > 1
};

struct AttendDecodeTuning {
  int cluster = 1;  // CTAs that share one item: 1, 2, 4, 8, 16
  int splits = 1;   // further cut of all keys (kFull) over clusters, merged by a second kernel
  bool dependent = true;  // programmatic dependent launch on the kernel before (the scores)
};

std::string attend_decode_supports(const MsaGeometry& geometry, int64_t max_q_len,
                                   int64_t max_blocks);

// Cluster size and splits from the batch class (number of sequences, bounds of lengths), never from
// the lengths themselves: hopper.md §6.6. full: over all keys.
AttendDecodeTuning attend_decode_tuning(const MsaGeometry& geometry, int num_seqs,
                                        int64_t max_q_len, int64_t max_k_len, bool full);

int64_t attend_decode_workspace_bytes(const MsaGeometry& geometry, int64_t num_queries, int splits);

void attend_decode(const AttendDecodeParams& params, int64_t max_q_len,
                   const AttendDecodeTuning& tuning, Stream stream);

}  // namespace m3
