// Tokens grouped by expert: the permutation that forward and backward share.
#pragma once
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace m3 {

struct MoeGroups {
  // Expert e has rows begin[e] .. begin[e + 1] of every permuted buffer; row r belongs to token token[r]. Stable:
  // tokens ascend inside an expert.
  std::vector<int64_t> begin;
  std::vector<int32_t> token;
  std::vector<int32_t> row;  // of slot (t, j), at t · K + j

  int64_t count(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
};

// ids_TK [T, K] i32; throws if an id is no expert.
MoeGroups moe_group(const Tensor& ids_TK, int64_t num_experts);

}  // namespace m3
