// The experts (model.md §6) and, with no routed expert, the dense MLP (§4.5):
//   expert(h) = W_down · swiglu_oai(W_gate h, W_up h)
//   y_t = routed_scale · Σ_j weights[t, j] · experts[ids[t, j]](h_t) + shared(h_t)
// The sum runs in fp32, in the order of j, shared last; y is rounded once. The activation a has h's type.
//   h_TC [T, C] f32 | bf16     ids_TK [T, K] i32, weights_TK [T, K] f32 (from moe_router)     y_TC [T, C] f32 | bf16
// Tokens are grouped by expert, stable by token; experts without tokens cost nothing and their weights are
// not touched. Dropless. y must not alias h.
// Scratch: moe_experts_scratch_bytes. Rows are independent of each other, bit for bit.
#pragma once
#include <span>

#include "ops/gemm/gemm.h"
#include "ops/swiglu_oai/swiglu_oai.h"

namespace m3 {

struct ExpertWeights {
  Weight gate_FC, up_FC;  // w1, w3 of the released names
  Weight down_CF;         // w2
};

struct MoeExperts {
  std::span<const ExpertWeights> routed;  // empty: dense MLP, ids and weights absent
  const ExpertWeights* shared =
      nullptr;  // may be absent; its width may differ from the routed ones'
  float routed_scale = 1.0f;
  SwigluOai swiglu;
};

void moe_experts(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                 const MoeExperts& experts, const Tensor& y_TC, Arena& scratch, Stream stream = {});

int64_t moe_experts_scratch_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden,
                                  int64_t expert_width, int64_t shared_width);

void moe_experts_ref(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                     const MoeExperts& experts, const Tensor& y_TC);

// What backward needs of the forward besides its inputs, if the caller has the memory to keep it: gate and up products
// before the activation, f32, rows in the order of moe_groups.h (routed) or of the tokens (shared). Given to
// moe_experts, it fills them; absent tensors are computed again by backward, to the same bits.
struct MoeSaved {
  Tensor routed_gate, routed_up;  // [T · K, F]
  Tensor shared_gate, shared_up;  // [T, F_shared]
};
void moe_experts_saving(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                        const MoeExperts& experts, const Tensor& y_TC, const MoeSaved& saved,
                        Arena& scratch, Stream stream = {});

struct ExpertGradients {  // f32, added to
  Tensor gate_FC, up_FC, down_CF;
};
struct MoeGradients {
  std::span<const ExpertGradients> routed;  // as many as experts
  const ExpertGradients* shared = nullptr;
};

// dy_TC f32 | bf16. dh_TC f32 += (the router adds its share to the same tensor); dweights_TK f32, written; weight
// gradients +=. Weights must be f32 or bf16. Fixed order of sums, whatever the threads.
// Scratch: moe_experts_backward_scratch_bytes.
void moe_experts_backward(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                          const MoeExperts& experts, const MoeSaved& saved, const Tensor& dy_TC,
                          const Tensor& dh_TC, const Tensor& dweights_TK,
                          const MoeGradients& gradients, Arena& scratch, Stream stream = {});
int64_t moe_experts_backward_scratch_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden,
                                           int64_t expert_width, int64_t shared_width);
void moe_experts_backward_ref(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                              const MoeExperts& experts, const Tensor& dy_TC, const Tensor& dh_TC,
                              const Tensor& dweights_TK, const MoeGradients& gradients);

}  // namespace m3
