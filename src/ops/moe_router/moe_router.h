// Router of the mixture of experts (model.md §6), fp32 throughout:
//   r = W_gate h    s = sigmoid(r)    E(t) = the k experts with the largest s + bias (ties: lower id)
//   w_e = s_e / Σ_{f in E(t)} s_f          the bias takes part in the choice only
//   h_TC    [T, C] f32 | bf16     gate_EC [E, C] f32 | bf16 (a bf16 router is widened)     bias_E [E] f32 | bf16
//   ids_TK  [T, K] i32, ascending in each row         weights_TK [T, K] f32, each row sums to 1
//   scores_TE [T, E] f32: all sigmoid scores (backward and statistics need them)
// routed_scaling_factor is applied where the experts are combined (moe_experts).
// Scratch: moe_router_scratch_bytes. Rows are independent of each other, bit for bit.
#pragma once
#include <span>

#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void moe_router(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& bias_E,
                const Tensor& scores_TE, const Tensor& ids_TK, const Tensor& weights_TK,
                Arena& scratch, Stream stream = {});

int64_t moe_router_scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t hidden);

// The choice alone, from scores: shared by both paths, and by a test with hand-made scores.
void moe_choose(const float* scores_E, const float* bias_E, int64_t num_experts, int64_t top_k,
                int32_t* ids_K, float* weights_K);

void moe_router_ref(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& bias_E,
                    const Tensor& scores_TE, const Tensor& ids_TK, const Tensor& weights_TK);

// Gradients through the weights of the chosen experts (the choice itself and the bias have none):
//   ds_e = (dw_e − Σ_{f in E(t)} dw_f · w_f) / Σ_{f in E(t)} s_f for the chosen, 0 for the others  (+ dscores[t, e])
//   dr = ds · s · (1 − s)      dh_TC += dr · W_gate      dgate_EC += drᵀ · h
//   scores_TE, ids_TK, weights_TK as the forward gave them; dweights_TK [T, K] f32; dscores_TE [T, E] f32 or absent: the
//   gradient of a loss on the scores themselves (moe_balance_loss)
//   dh_TC f32; dgate_EC f32
// Scratch: moe_router_backward_scratch_bytes.
void moe_router_backward(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& scores_TE,
                         const Tensor& ids_TK, const Tensor& weights_TK, const Tensor& dweights_TK,
                         const Tensor& dscores_TE, const Tensor& dh_TC, const Tensor& dgate_EC,
                         Arena& scratch, Stream stream = {});
int64_t moe_router_backward_scratch_bytes(int64_t num_tokens, int64_t num_experts);
void moe_router_backward_ref(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& scores_TE,
                             const Tensor& ids_TK, const Tensor& weights_TK,
                             const Tensor& dweights_TK, const Tensor& dscores_TE,
                             const Tensor& dh_TC, const Tensor& dgate_EC);

// Balance without gradient (training.md §8): bias_e += step · sign(mean count − count_e), counts of the whole step.
// bias_E f32, counts_E i64.
void moe_balance_step(const Tensor& counts_E, float step, const Tensor& bias_E);
// counts_E[e] += tokens of ids_TK that chose e.
void moe_count(const Tensor& ids_TK, const Tensor& counts_E);

// Optional sequence-wise balance loss. Per document d of n tokens (cu_documents: offsets from 0 to T):
//   f_e = E / (K · n) · #{t in d: e chosen}      P_e = 1 / n · Σ_{t in d} s_te / Σ_f s_tf      L_d = Σ_e f_e · P_e
// Returns Σ_d n · L_d (the caller divides by its token count); dscores_TE [T, E] f32 += factor · d / d scores.
double moe_balance_loss(const Tensor& scores_TE, const Tensor& ids_TK,
                        std::span<const int32_t> cu_documents, float factor,
                        const Tensor& dscores_TE);

}  // namespace m3
