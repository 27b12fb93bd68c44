// Selection of a prefill with 8-bit index keys on the GPU (msa.md §12, hopper.md §6.2): the scores
// of all history blocks come from int8 products, twice as fast as bf16 ones.
//
//   approx   (candidates = K - 1) the best K - 1 history blocks by the 8-bit scores
//   rescore  (candidates = 24, 32 or 64) the best history blocks by the 8-bit scores, whose lower
//            13 bits or more make room for the block id, get their bf16 scores; the best K - 1 of
//            these are chosen
//   exact    (candidates = 64, `uncertified` present) the candidates are the blocks with the largest
//            upper bounds of their bf16 scores. A row has a certificate if the last candidate's bound
//            is below the bf16 score of the last chosen block. Tiles of 256 rows with a row that has
//            none are scanned again in bf16, so the ids equal those of the bf16 path.
//
// The bound of block b (msa.md §12): its 8-bit score in true scale + |qi| e_b + |q8 - qi| (n_b + e_b)
// + 2^-13 |qi| n_b; the last term covers the order of the fp32 sums and the bound's own roundings.
// Queries are quantised to int8 per row; their scale is left out of the scores, whose order it does
// not change. Keys: codes and page scales of index_keys8.h, complete for every history block.
// Paged, X = B = 128, K = 16, one forced local block; ids ascend as in index_select.h. No call
// allocates or waits. Rows are worked off in chunks, which bounds the workspace.
#pragma once
#include <string>

#include "ops/index_select/index_keys8.h"

namespace m3 {

struct IndexPrefill8Params {
  MsaGeometry geometry;
  MsaBatch batch;  // device arrays; max_q_len and max_k_len set
  const void* qi_TRX = nullptr;
  const void* x_PBX = nullptr;  // bf16 keys, for rescore
  IndexKeys8 keys;              // error_P and norm_P only for exact
  int64_t num_pages = 0;
  int candidates = 32;
  int32_t* ids_RTK = nullptr;
  int32_t* uncertified = nullptr;  // [1]: how many rows had no certificate; absent: not exact
  void* workspace = nullptr;
};

// Empty, or why the call is not supported.
std::string index_prefill8_supports(const MsaGeometry& geometry, const MsaBatch& batch,
                                    int candidates);

int64_t index_prefill8_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch,
                                       int64_t num_pages, int candidates);

void index_prefill8(const IndexPrefill8Params& params, Stream stream);

}  // namespace m3
