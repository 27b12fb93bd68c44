// The honest FLOP count of training (training.md §18, msa.md §13): multiply and add are two.
//
//   weights     6 per active weight and row (2 forward, 4 backward); index projections 4, since
//               their input is detached; the head on target rows only; the embedding is free
//   attention   4 H D forward and 10 H D backward per visible pair
//   index       2 R X per causal pair for the scores of the selection;
//               KL 2 (D H + 3 X R) per pair of its support
//   vision      6 per weight and patch (or merged row), 14 H D per pair of one segment
// Recomputation is never counted.
#pragma once
#include <span>

#include "model/trainable_model.h"

namespace m3::train {

struct FlopCount {
  double text = 0, head = 0, attention = 0, index = 0, vision = 0;
  double total() const { return text + head + attention + index + vision; }
  void add(const FlopCount& other);
};

// Of one micro-batch, forward and backward.
FlopCount train_flops(const ModelConfig& config, const TrainOptions& options,
                      const MicroBatch& batch);

// Visible pairs of a document of `tokens` tokens: all earlier ones and itself; at most `blocks`
// blocks of B, the own one among them.
int64_t causal_pairs(int64_t tokens);
int64_t selected_pairs(int64_t tokens, int64_t block_tokens, int64_t blocks);

}  // namespace m3::train
