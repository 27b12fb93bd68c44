// index_select for a decode step on Hopper: 1 to 16 query tokens per sequence against a paged
// cache. Contract of the results: index_select.h, msa.md §2-§4; design: hopper.md §6.6.
//
// Two kernels. `index_decode_scores` streams the history pages of X once and writes the block
// scores
//   M[i, r, b]   fp32 [T, R, score_stride], b = 0 .. (last own block of the sequence) - 1
// for every sequence with more than K visible blocks (others are not read, their scores stay
// undefined). `index_decode_choose` turns a row's scores into ids. attend_decode.h can do the
// second step itself.
//
// bf16, X = B = 128, R * (query tokens of a sequence) <= 64, local = 1, init = 0, K <= 32, at most
// 8192 blocks per sequence; index_decode_supports names what is outside. Lengths, cu_q and page
// tables are read from device memory. A score is a pure function of the row and the block: one
// chain of eight mma.sync steps over X, whatever the batch, the number of query tokens and the
// split. No atomics.
#pragma once
#include <string>

#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

constexpr int kIndexDecodeMaxColumns = 64;  // groups x query tokens of one sequence

struct IndexDecodeParams {
  const void* qi_TRX = nullptr;         // bf16, contiguous
  const void* x_PBX = nullptr;          // bf16 pages; of index_decode_scores8: int8 codes
  const float* scale_P = nullptr;       // index_decode_scores8 only: value = scale x code
  const int32_t* cu_q = nullptr;        // [num_seqs + 1]
  const int32_t* seq_lens = nullptr;    // [num_seqs]
  const int32_t* page_table = nullptr;  // [num_seqs, page_stride]
  int64_t page_stride = 0;
  int num_seqs = 0;
  int groups = 0;
  int topk = 0;
  bool score_all = false;             // also rows that see at most K blocks (for sel_scores)
  const int32_t* wanted_N = nullptr;  // sequences with 0 here are not scored; absent: all are
  float* scores_TRM = nullptr;
  int64_t score_stride = 0;
};

struct IndexChooseParams {
  const float* scores_TRM = nullptr;
  int64_t score_stride = 0;
  const int32_t* cu_q = nullptr;
  const int32_t* seq_lens = nullptr;
  int num_seqs = 0;
  int groups = 0;
  int topk = 0;
  int64_t num_queries = 0;
  int32_t* ids_RTK = nullptr;
  float* sel_scores_RTK = nullptr;  // absent, or wants score_all above
  const int32_t* wanted_N =
      nullptr;  // rows of sequences with 0 here stay as they are; absent: none do
};

// Launch choices; the defaults are the measured best (docs/lab/decode.md).
struct IndexDecodeTuning {
  int stages = 3;          // pages in flight per CTA
  int ctas = 0;            // 0: one per SM
  bool dependent = false;  // programmatic dependent launch on the kernel before
};

// Empty if the decode kernels take this geometry and these bounds, else what they do not take.
std::string index_decode_supports(const MsaGeometry& geometry, int64_t max_q_len,
                                  int64_t max_blocks);

int64_t index_decode_score_stride(int64_t max_blocks);

void index_decode_scores(const IndexDecodeParams& params, int64_t max_q_len,
                         const IndexDecodeTuning& tuning, Stream stream);
void index_decode_choose(const IndexChooseParams& params, int64_t max_blocks, bool dependent,
                         Stream stream);

}  // namespace m3
