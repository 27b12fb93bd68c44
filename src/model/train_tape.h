// The intermediates of a training pass over the text layers, and the passes themselves, one layer
// at a time. T tokens, C hidden, V vocabulary, N rows with a target.
#pragma once
#include <vector>

#include "model/attention_backward.h"
#include "model/ffn_backward.h"

namespace m3 {

enum class TapeUse : uint8_t {
  kForwardOnly,  // all layers share their tensors
  kRecompute,    // layers keep x, lists and the choice of experts; the rest is shared and computed
                 // again
  kKeep,
};

struct LayerTape {
  Tensor x_TC, mid_TC;  // residual stream before the layer and between attention and FFN, f32
  AttentionActs attention;
  FfnActs ffn;
};

struct TrainTape {
  TapeUse use = TapeUse::kKeep;
  std::vector<LayerTape> layers;
  Tensor x_TC;  // after the last layer
};

struct TapeShape {
  int64_t num_tokens = 0;
  DType dtype = DType::kF32;  // of activations
  AttentionMode mode = AttentionMode::kMsa;
  bool teach_index = false;
  TapeUse use = TapeUse::kKeep;
  bool keep_gates = false;  // kForwardOnly: gate and up products too, for instruments
};

TrainTape alloc_train_tape(const TextConfig& config, const TapeShape& shape, Arena& arena);

// Layer l: tape.layers[l].x -> layers[l + 1].x, or tape.x after the last.
void layer_forward(const TextConfig& config, const LayerWeights& weights, int layer,
                   const AttentionStep& step, const GemmOptions& gemm_options,
                   const TrainTape& tape, Arena& arena, Stream stream = {});
// Recomputation: everything of layer l that the backward reads, with the choices of the first pass;
// `ffn`: also of the FFN.
void layer_again(const TextConfig& config, const LayerWeights& weights, int layer,
                 const AttentionStep& step, const GemmOptions& gemm_options, const TrainTape& tape,
                 bool ffn, Arena& arena, Stream stream = {});

}  // namespace m3
