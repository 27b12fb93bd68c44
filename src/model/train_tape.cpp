#include "model/train_tape.h"

#include <algorithm>

namespace m3 {

namespace {

AttentionActs without_index(AttentionActs acts) {
  acts.qi_raw_TRX = acts.ki_raw_TX = acts.qi_TRX = acts.ki_TX = acts.lists = Tensor();
  return acts;
}

FfnActs without_router(FfnActs acts) {
  acts.scores_TE = acts.expert_ids_TK = acts.expert_weights_TK = Tensor();
  return acts;
}

MoeSaved alloc_saved(const TextConfig& config, int64_t num_tokens, bool moe, Arena& arena) {
  const int64_t slots = num_tokens * config.num_experts_per_token,
                F = config.expert_intermediate_size,
                shared = moe ? config.shared_intermediate_size : config.dense_intermediate_size;
  MoeSaved saved;
  if (moe) {
    saved.routed_gate = arena.alloc("expert gate", DType::kF32, {slots, F});
    saved.routed_up = arena.alloc("expert up", DType::kF32, {slots, F});
  }
  saved.shared_gate = arena.alloc("mlp gate", DType::kF32, {num_tokens, shared});
  saved.shared_up = arena.alloc("mlp up", DType::kF32, {num_tokens, shared});
  return saved;
}

}  // namespace

TrainTape alloc_train_tape(const TextConfig& config, const TapeShape& shape, Arena& arena) {
  const int64_t T = shape.num_tokens;
  const Shape residual = {T, config.hidden_size};
  const bool keep = shape.use == TapeUse::kKeep;
  const auto attention = [&](bool sparse) {
    return alloc_attention_acts(config, T, shape.dtype, shape.mode, sparse, Keep::kForBackward,
                                arena, shape.teach_index);
  };
  TrainTape tape;
  tape.use = shape.use;
  LayerTape shared;
  if (!keep) {
    shared.attention = attention(config.num_sparse_layers() > 0);
    shared.ffn = alloc_ffn_acts(config, T, shape.dtype, config.num_moe_layers() > 0, arena);
    shared.mid_TC = arena.alloc("residual", DType::kF32, residual);
  }
  MoeSaved gates[2];  // of all dense layers, of all MoE layers
  if (shape.keep_gates) {
    if (config.num_moe_layers() < config.num_layers) gates[0] = alloc_saved(config, T, false, arena);
    if (config.num_moe_layers() > 0) gates[1] = alloc_saved(config, T, true, arena);
  }
  for (int l = 0; l < config.num_layers; ++l) {
    const bool sparse = config.is_sparse[l], moe = config.is_moe[l];
    LayerTape layer;
    if (shape.use == TapeUse::kForwardOnly) {
      layer.x_TC = layer.mid_TC = shared.mid_TC;
    } else {
      layer.x_TC = arena.alloc("residual", DType::kF32, residual);
      layer.mid_TC = keep ? arena.alloc("residual", DType::kF32, residual) : shared.mid_TC;
    }
    if (keep) {
      layer.attention = attention(sparse);
      layer.ffn = alloc_ffn_acts(config, T, shape.dtype, moe, arena);
      layer.ffn.saved = alloc_saved(config, T, moe, arena);
    } else {
      layer.attention = sparse ? shared.attention : without_index(shared.attention);
      layer.ffn = moe ? shared.ffn : without_router(shared.ffn);
      layer.ffn.saved = gates[moe];
    }
    if (shape.use == TapeUse::kRecompute) {
      Tensor& lists = layer.attention.lists;
      if (lists.defined()) lists = arena.alloc("lists", DType::kI32, lists.shape());
      for (Tensor* choice :
           {&layer.ffn.scores_TE, &layer.ffn.expert_ids_TK, &layer.ffn.expert_weights_TK}) {
        if (choice->defined())
          *choice = arena.alloc("choice of experts", choice->dtype(), choice->shape());
      }
    }
    tape.layers.push_back(layer);
  }
  tape.x_TC = shape.use == TapeUse::kForwardOnly ? shared.mid_TC
                                                 : arena.alloc("residual", DType::kF32, residual);
  return tape;
}

void layer_forward(const TextConfig& config, const LayerWeights& weights, int layer,
                   const AttentionStep& step, const GemmOptions& gemm_options,
                   const TrainTape& tape, Arena& arena, Stream stream) {
  const LayerTape& t = tape.layers[layer];
  const bool last = layer + 1 == config.num_layers;
  const Tensor& out_TC = last ? tape.x_TC : tape.layers[layer + 1].x_TC;
  if (t.mid_TC.data() != t.x_TC.data()) copy(t.x_TC, t.mid_TC, stream);
  attention_forward(config, weights.attention, config.is_sparse[layer], step, nullptr, gemm_options,
                    t.attention, t.mid_TC, arena, stream);
  if (out_TC.data() != t.mid_TC.data()) copy(t.mid_TC, out_TC, stream);
  ffn_forward(config, weights.ffn, t.ffn, out_TC, arena, stream);
}

void layer_again(const TextConfig& config, const LayerWeights& weights, int layer,
                 const AttentionStep& step, const GemmOptions& gemm_options, const TrainTape& tape,
                 bool ffn, Arena& arena, Stream stream) {
  const LayerTape& t = tape.layers[layer];
  AttentionActs acts = t.attention;
  acts.lists_chosen = true;
  copy(t.x_TC, t.mid_TC, stream);
  attention_forward(config, weights.attention, config.is_sparse[layer], step, nullptr, gemm_options,
                    acts, t.mid_TC, arena, stream);
  if (ffn) ffn_norm(config, weights.ffn, t.ffn, t.mid_TC, stream);
}

}  // namespace m3
