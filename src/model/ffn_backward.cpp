#include "model/ffn_backward.h"

#include <algorithm>
#include <vector>

#include "ops/elementwise/elementwise.h"
#include "ops/moe_router/moe_router.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

namespace {

struct Gradients {
  Tensor dy_TC;  // dx in the type of products
  Tensor dh_TC, dweights_TK;
};

Gradients alloc(const TextConfig& config, int64_t num_tokens, DType dtype, Arena& arena) {
  Gradients g;
  if (dtype != DType::kF32)
    g.dy_TC = arena.alloc("dx, rounded", dtype, {num_tokens, config.hidden_size});
  g.dh_TC = arena.alloc("dh", DType::kF32, {num_tokens, config.hidden_size});
  g.dweights_TK =
      arena.alloc("dweights", DType::kF32, {num_tokens, std::max(1, config.num_experts_per_token)});
  return g;
}

ExpertGradients gradients_of(const ExpertWeights& w) {
  return {w.gate_FC.values, w.up_FC.values, w.down_CF.values};
}

}  // namespace

int64_t ffn_backward_scratch_bytes(const TextConfig& config, int64_t num_tokens, DType dtype) {
  const int64_t T = num_tokens, C = config.hidden_size;
  Arena measuring = Arena::measuring("ffn backward");
  alloc(config, T, dtype, measuring);
  int64_t bytes = rmsnorm_backward_scratch_bytes(T, C);
  if (config.num_moe_layers() > 0) {
    bytes = std::max({bytes, moe_router_backward_scratch_bytes(T, config.num_experts),
                      moe_experts_backward_scratch_bytes(T, config.num_experts_per_token, C,
                                                         config.expert_intermediate_size,
                                                         config.shared_intermediate_size)});
  }
  if (config.num_moe_layers() < config.num_layers) {
    bytes = std::max(
        bytes, moe_experts_backward_scratch_bytes(T, 0, C, 0, config.dense_intermediate_size));
  }
  return measuring.peak_bytes() + bytes + 2 * Arena::kAlignment;
}

void ffn_backward(const TextConfig& config, const FfnWeights& weights, const FfnActs& acts,
                  const Tensor& dscores_TE, const Tensor& x_TC, const Tensor& dx_TC,
                  const FfnWeights& gradients, Arena& scratch, Stream stream) {
  ArenaScope scope(scratch);
  const bool moe = weights.router_EC.defined();
  const Gradients g = alloc(config, x_TC.dim(0), acts.h_TC.dtype(), scratch);
  const Tensor& dy_TC = g.dy_TC.defined() ? g.dy_TC : dx_TC;
  if (g.dy_TC.defined()) cast(dx_TC, g.dy_TC, stream);
  fill_zero(g.dh_TC, stream);

  std::vector<ExpertGradients> routed;
  if (moe) {
    for (const ExpertWeights& w : gradients.routed) routed.push_back(gradients_of(w));
  }
  const ExpertGradients shared = gradients_of(gradients.shared);
  moe_experts_backward(acts.h_TC, acts.expert_ids_TK, acts.expert_weights_TK,
                       experts_of(config, weights), acts.saved, dy_TC, g.dh_TC,
                       moe ? g.dweights_TK : Tensor(), {routed, &shared}, scratch, stream);
  if (moe) {
    moe_router_backward(acts.router_h_TC, weights.router_EC, acts.scores_TE, acts.expert_ids_TK,
                        acts.expert_weights_TK, g.dweights_TK, dscores_TE, g.dh_TC,
                        gradients.router_EC, scratch, stream);
  }
  rmsnorm_backward(x_TC, weights.norm_C, g.dh_TC, config.rms_norm_eps, dx_TC, true,
                   gradients.norm_C, scratch, stream);
}

}  // namespace m3
