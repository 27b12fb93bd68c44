// Selection of a decode step with 8-bit index keys (msa.md §12, hopper.md §6.2): the scan reads
// half the bytes; bf16 keys settle the choice.
//
//   approx   ids by the 8-bit scores: index_decode_scores8, then index_decode_choose or the
//            attention
//   rescore  index_decode_scores8, then index_decode_rescore: the `candidates` best history blocks
//            get their bf16 scores (the very bits of index_decode_scores), the best K - 1 of these
//            are chosen
//   exact    as rescore, with a certificate per row: every block left out has 8-bit score + bound
//            below the score of the last chosen block. Sequences with an uncertified row are
//            scanned again in bf16 (index_decode_exact), so the ids always equal those of the bf16
//            path.
//
// The bound of block b (msa.md §12): |qi| e_b + |q8 - qi| (n_b + e_b), plus 2^-14 |qi| n_b for the
// order of the fp32 sums (128 terms, at most 2^-23 each relative to |q||k|, with a wide margin for
// mma rounding).
#pragma once
#include "ops/index_select/index_keys8.h"
#include "ops/index_select/index_select_decode.h"

namespace m3 {

constexpr int kIndexDecodeMaxCandidates = 64;

// Block scores from codes: x_PBX and scale_P of `params` are codes and scales; each query row is
// quantised to int8 with its own scale, which is left out of the scores (it does not change their
// order).
void index_decode_scores8(const IndexDecodeParams& params, int64_t max_q_len,
                          const IndexDecodeTuning& tuning, Stream stream);

struct IndexRescoreParams {
  IndexDecodeParams scan;  // x_PBX: bf16 keys; scores_TRM: written by index_decode_scores8
  IndexKeys8 keys;         // error_P and norm_P, for the certificate
  int candidates = 32;     // at least K - 1, at most 64
  int64_t num_queries = 0;
  int32_t* ids_RTK = nullptr;
  int32_t* uncertified_N = nullptr;  // exact: per sequence, how many rows have no certificate (set
                                     // to 0 by the caller before); absent: rescore
};
void index_decode_rescore(const IndexRescoreParams& params, int64_t max_blocks, bool dependent,
                          Stream stream);

// The second scan of `exact`: bf16 scores into scan.scores_TRM and the choice, for sequences with
// an uncertified row only. Launches, and mostly finds nothing to do.
void index_decode_exact(const IndexRescoreParams& params, int64_t max_q_len, int64_t max_blocks,
                        Stream stream);

}  // namespace m3
