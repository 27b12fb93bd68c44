// Router of the mixture of experts (model.md §6), fp32 throughout:
//   r = W_gate h    s = sigmoid(r)    E(t) = the k experts with the largest s + bias (ties: lower id)
//   w_e = s_e / Σ_{f in E(t)} s_f          the bias takes part in the choice only
//   h_TC    [T, C] f32 | bf16     gate_EC [E, C] f32 | bf16 (a bf16 router is widened)     bias_E [E] f32 | bf16
//   ids_TK  [T, K] i32, ascending in each row         weights_TK [T, K] f32, each row sums to 1
//   scores_TE [T, E] f32: all sigmoid scores (backward and statistics need them)
// routed_scaling_factor is applied where the experts are combined (moe_experts).
// Scratch: moe_router_scratch_bytes. Rows are independent of each other, bit for bit.
#pragma once
#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void moe_router(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& bias_E, const Tensor& scores_TE,
                const Tensor& ids_TK, const Tensor& weights_TK, Arena& scratch, Stream stream = {});

int64_t moe_router_scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t hidden);

// The choice alone, from scores: shared by both paths, and by a test with hand-made scores.
void moe_choose(const float* scores_E, const float* bias_E, int64_t num_experts, int64_t top_k, int32_t* ids_K,
                float* weights_K);

void moe_router_ref(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& bias_E, const Tensor& scores_TE,
                    const Tensor& ids_TK, const Tensor& weights_TK);

}  // namespace m3
