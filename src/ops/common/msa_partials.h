// Sums over query rows (dk, dv, dki) are cut into pieces that threads compute apart and that are added in a fixed order.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "ops/common/msa_types.h"

namespace m3 {

// One piece of CPU work: query rows [q_begin, q_end) of a sequence (relative) against all keys they see. Its sums for
// positions [0, num_keys) have a place of their own, partial_begin floats into the workspace.
struct MsaPiece {
  int32_t seq, group, q_begin, q_end;
  int64_t num_keys;
  int64_t partial_begin;
};

struct MsaPieces {
  std::vector<MsaPiece> items;
  std::vector<int32_t> left_out;  // sequences
  int64_t partial_floats = 0;     // of all pieces
};

// Cuts the query rows of each sequence, once for each of `groups` groups; `floats_per_key` is what a piece sums for a
// key. `takes_part` [num_seqs]: 0 leaves a sequence out; empty: all take part. The cut depends on lengths only.
MsaPieces msa_cut(const MsaBatch& batch, int groups, int64_t floats_per_key, std::span<const uint8_t> takes_part = {});

// What some query rows of sequence `seq` add to the first num_keys key rows of it: [num_keys, stride] fp32.
struct MsaPartial {
  int seq;
  int64_t num_keys;
  const float* rows;
};

// out[s, head] = sum of the partials of key row s in the given order (they are sorted by seq), rounded once. Rows without a
// partial become 0. out is [S, heads, D] or [S, D] (heads = 1), f32|bf16. Fragments (MsaBatch::lead) share rows.
void msa_sum_partials(const MsaBatch& batch, std::span<const MsaPartial> partials, int64_t stride, const Tensor& out,
                      int64_t heads, int64_t head);

}  // namespace m3
