// Backward of the attention block and the loss of its index branch (msa.md §8, §9; training.md §9).
// The forward is attention_forward without a cache, with AttentionActs kept (Keep::kForBackward).
//
//   x_out = x + W_o attend(q, k, v)        dx (of x_out) becomes dx (of x)
//
// Weight gradients are added to what is there.
//
// What the KL may not touch stays untouched by construction: index_loss writes gradients of index
// parameters only, and attention_backward of all others. T tokens, C hidden, R groups.
#pragma once
#include <span>
#include <vector>

#include "model/attention_block.h"
#include "ops/attend_backward/attend_backward.h"
#include "ops/dsa_kl/dsa_kl.h"
#include "ops/index_kl/index_kl.h"

namespace m3 {

// Plans that all layers of a micro-batch share.
struct AttentionBackwardStep {
  AttendBackwardPlan sparse, full;
  bool has_kl = false;
  IndexKlPlan kl;
  DsaKlPlan dsa_kl;  // AttentionMode::kDsa: in its place
  // lambda / (N R) of the global batch, or lambda / N of DSA's one list per query
  double kl_weight = 0;
  int64_t workspace_bytes = 0;  // largest of the plans
};

// `kl_documents` [N]: 1 where the document takes part in the KL; empty: no KL at all.
// `query_weight`: lambda / N.
AttentionBackwardStep plan_attention_backward(const TextConfig& config, const AttentionStep& step,
                                              std::span<const uint8_t> kl_documents,
                                              double query_weight);

// dx_TC [T, C] f32, updated in place; x_TC the block's input, f32. `gradients`: f32, weights as
// their values. `index_dh_TC` (f32, usually absent) is what index_loss adds to the gradient of h.
void attention_backward(const TextConfig& config, const AttentionWeights& weights, bool sparse,
                        const AttentionStep& step, const AttentionBackwardStep& plans,
                        const GemmOptions& gemm_options, const AttentionActs& acts,
                        const Tensor& x_TC, const Tensor& dx_TC, const Tensor& index_dh_TC,
                        const AttentionWeights& gradients, Arena& scratch, Stream stream = {});

// KL of a sparse layer: adds to the gradients of its index parameters and returns the sum of the KL
// rows. With `dh_TC` (f32) the gradient of the branch's input is added there: only for the
// experiment without the stop-gradient.
double index_loss(const TextConfig& config, const AttentionWeights& weights,
                  const AttentionStep& step, const AttentionBackwardStep& plans,
                  const GemmOptions& gemm_options, const AttentionActs& acts, const Tensor& dh_TC,
                  const AttentionWeights& gradients, Arena& scratch, Stream stream = {});

// Of either call.
int64_t attention_backward_scratch_bytes(const TextConfig& config, int64_t num_tokens, DType dtype,
                                         const AttentionBackwardStep& plans);

}  // namespace m3
