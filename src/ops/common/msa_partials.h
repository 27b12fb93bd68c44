// Sums over query rows (dk, dv, dki) are cut into pieces that threads compute apart and that are added in a fixed order.
#pragma once
#include <cstdint>
#include <span>

#include "ops/common/msa_types.h"

namespace m3 {

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
