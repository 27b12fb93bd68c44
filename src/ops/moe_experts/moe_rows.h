// Parts that forward and backward of moe_experts share.
#pragma once
#include <vector>

#include "ops/gemm/gemm_problem.h"
#include "ops/moe_experts/moe_experts.h"
#include "ops/moe_experts/moe_groups.h"

namespace m3 {

// Checks all shapes; groups is filled if there are routed experts.
struct MoeShape {
  int64_t T = 0, C = 0, E = 0, K = 0, F = 0, F_shared = 0;
  MoeGroups groups;
  int64_t slots() const { return T * K; }
};
MoeShape moe_shape(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                   const MoeExperts& experts);

// Gate and up products of all experts, in one parallel region, into tensors as MoeSaved describes.
void moe_gate_up(const Tensor& h_TC, const MoeShape& shape, const MoeExperts& experts,
                 const MoeSaved& rows);

// The tensors of `saved`, or new ones from scratch where they are absent.
MoeSaved moe_rows_for(const MoeShape& shape, const MoeSaved& saved, Arena& scratch);

}  // namespace m3
