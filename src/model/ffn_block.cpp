#include "model/ffn_block.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/moe_router/moe_router.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

FfnActs alloc_ffn_acts(const TextConfig& config, int64_t num_tokens, DType dtype, bool moe, Arena& arena) {
  FfnActs acts;
  acts.h_TC = arena.alloc("ffn input", dtype, {num_tokens, config.hidden_size});
  acts.y_TC = arena.alloc("ffn output", DType::kF32, {num_tokens, config.hidden_size});
  if (moe) {
    acts.router_h_TC = dtype == DType::kF32
                           ? acts.h_TC
                           : arena.alloc("router input", DType::kF32, {num_tokens, config.hidden_size});
    acts.scores_TE = arena.alloc("router scores", DType::kF32, {num_tokens, config.num_experts});
    acts.expert_ids_TK = arena.alloc("expert ids", DType::kI32, {num_tokens, config.num_experts_per_token});
    acts.expert_weights_TK = arena.alloc("expert weights", DType::kF32, {num_tokens, config.num_experts_per_token});
  }
  return acts;
}

int64_t ffn_scratch_bytes(const TextConfig& config, int64_t num_tokens) {
  int64_t bytes = 0;
  if (config.num_moe_layers() > 0) {
    bytes = std::max(moe_router_scratch_bytes(num_tokens, config.num_experts, config.hidden_size),
                     moe_experts_scratch_bytes(num_tokens, config.num_experts_per_token, config.hidden_size,
                                               config.expert_intermediate_size, config.shared_intermediate_size));
  }
  if (config.num_moe_layers() < config.num_layers) {
    bytes = std::max(bytes, moe_experts_scratch_bytes(num_tokens, 0, config.hidden_size, 0,
                                                      config.dense_intermediate_size));
  }
  return bytes;
}

MoeExperts experts_of(const TextConfig& config, const FfnWeights& weights) {
  MoeExperts experts;
  experts.swiglu = {config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta};
  experts.shared = &weights.shared;
  if (!weights.router_EC.defined()) return experts;
  experts.routed = weights.routed;
  experts.routed_scale = config.routed_scaling_factor;
  return experts;
}

void ffn_norm(const TextConfig& config, const FfnWeights& weights, const FfnActs& acts, const Tensor& x_TC,
              Stream stream) {
  // A router that sees rounded activations flips more experts: two bf16 roundings apart are about as much as
  // the gap between the last expert chosen and the next at one token in a hundred.
  const bool moe = weights.router_EC.defined();
  rmsnorm(x_TC, weights.norm_C, moe ? acts.router_h_TC : acts.h_TC, config.rms_norm_eps, stream);
  if (moe && acts.h_TC.dtype() != DType::kF32) cast(acts.router_h_TC, acts.h_TC, stream);
}

void ffn_forward(const TextConfig& config, const FfnWeights& weights, const FfnActs& acts, const Tensor& x_TC,
                 Arena& scratch, Stream stream) {
  ffn_norm(config, weights, acts, x_TC, stream);
  if (weights.router_EC.defined()) {
    moe_router(acts.router_h_TC, weights.router_EC, weights.router_bias_E, acts.scores_TE, acts.expert_ids_TK,
               acts.expert_weights_TK, scratch, stream);
  }
  moe_experts_saving(acts.h_TC, acts.expert_ids_TK, acts.expert_weights_TK, experts_of(config, weights), acts.y_TC,
                     acts.saved, scratch, stream);
  add(x_TC, acts.y_TC, x_TC, stream);
}

}  // namespace m3
