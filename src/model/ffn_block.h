// Feed-forward block of a decoder layer (model.md §4.5, §6):
//   h = gnorm(x)    x += experts(h), or the dense MLP where the layer has no router
//
// T tokens, C hidden, E experts, K experts of a token. Acts as in attention_block.h.
#pragma once
#include "formats/config.h"
#include "model/attention_block.h"
#include "model/weights.h"

namespace m3 {

struct FfnActs {
  Tensor h_TC;                                          // normed input
  Tensor router_h_TC;                                   // MoE: the same in f32 (model.md §6)
  Tensor y_TC;                                          // f32, added to x
  Tensor scores_TE, expert_ids_TK, expert_weights_TK;   // MoE only
  MoeSaved saved;                                       // for the backward, if there is memory to keep it
};

FfnActs alloc_ffn_acts(const TextConfig& config, int64_t num_tokens, DType dtype, bool moe, Arena& arena);

// x_TC [T, C] f32, updated in place. `scratch` needs ffn_scratch_bytes.
void ffn_forward(const TextConfig& config, const FfnWeights& weights, const FfnActs& acts, const Tensor& x_TC,
                 Arena& scratch, Stream stream = {});

// Its parts that the backward needs: the normed input alone, into acts.h and acts.router_h; the experts as the op wants them.
void ffn_norm(const TextConfig& config, const FfnWeights& weights, const FfnActs& acts, const Tensor& x_TC,
              Stream stream = {});
MoeExperts experts_of(const TextConfig& config, const FfnWeights& weights);

int64_t ffn_scratch_bytes(const TextConfig& config, int64_t num_tokens);

}  // namespace m3
