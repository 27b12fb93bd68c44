// Backward of the feed-forward block (model.md §4.5, §6; training.md §8).
//
//   x_out = x + experts(gnorm(x))          dx (of x_out) becomes dx (of x)
//
// Weight gradients are added to what is there. The choice of experts is a constant, as the forward
// left it in FfnActs. T tokens, C hidden, E experts.
#pragma once
#include "model/ffn_block.h"

namespace m3 {

// acts: h, router_h, scores, ids and weights of the forward; acts.saved may be absent (the same
// bits come out). dscores_TE: gradient of a balance loss on the scores, or absent. dx_TC [T, C]
// f32, updated in place; x_TC the block's input, f32. `gradients`: f32; its router bias is not
// touched.
void ffn_backward(const TextConfig& config, const FfnWeights& weights, const FfnActs& acts,
                  const Tensor& dscores_TE, const Tensor& x_TC, const Tensor& dx_TC,
                  const FfnWeights& gradients, Arena& scratch, Stream stream = {});

int64_t ffn_backward_scratch_bytes(const TextConfig& config, int64_t num_tokens, DType dtype);

}  // namespace m3
