// The text decoder (model.md §4): embedding, layers, final norm and head, over a batch of requests whose keys
// and values lie in a paged cache.
//
// A step takes packed new tokens of N sequences: chunks of prompts and single decode tokens mixed. The
// rules are those of msa.md §6: seq_lens count the new tokens, which are the last ones of their sequence.
//
// T tokens of the step, L rows whose logits are wanted, C hidden, V vocabulary, P pages.
#pragma once
#include <functional>
#include <optional>
#include <span>

#include "model/attention_block.h"
#include "model/ffn_block.h"
#include "model/kv_cache.h"
#include "model/weights.h"

namespace m3 {

// Rows of media features that take the place of placeholder tokens in this step.
struct FeatureRows {
  std::span<const int32_t> rows;  // of the step's T rows, distinct
  Tensor features_MC;             // one row each, f32 | bf16
};

struct StepInput {
  std::span<const int32_t> ids_T;
  std::span<const int32_t> cu_q;        // [N + 1]
  std::span<const int32_t> seq_lens;    // [N]
  std::span<const int32_t> page_table;  // [N, max_pages]
  int64_t max_pages = 0;
  std::span<const FeatureRows> features;
  std::span<const int32_t> logit_rows;  // [L], of the step's T rows
};

// What a step computed inside, for checks and instruments. Tensors are valid during the call only.
struct StepTrace {
  struct Layer {
    int index;
    Tensor x_TC;           // residual stream after the layer, f32
    Tensor lists;          // ids_RTK of a sparse layer (or tokens_TK with kDsa), else absent
    Tensor expert_ids_TK;  // of a MoE layer, ascending in each row, else absent
    Tensor scores_TE;      // of its router
  };
  std::function<void(const Layer&)> after_layer;
};

struct DecoderOptions {
  DType dtype = DType::kBF16;  // of the cache and of products; f32 computes in fp32 throughout
  AttentionMode attention = AttentionMode::kMsa;
  GemmOptions gemm;
  // Of the tensors between operators. Unset: bf16 where that is faster, f32 elsewhere (activation_dtype).
  std::optional<DType> activations;

  // f32 activations round three to five times less (measured on the router scores of the golden models, where a
  // near-tied expert or block flips at one token in a hundred with bf16). They cost nothing unless the CPU
  // multiplies bf16 pairs, and little where matrices are too small to be bound by products.
  static constexpr int kMinHiddenForBf16 = 512;
  DType activation_dtype(const TextConfig& config) const;
};

// Returns logits_LV, f32, in `arena`. Everything the step needs is carved from `arena`, from where it
// stands on. Throws on ids outside the vocabulary and on shapes that do not fit each other.
Tensor decoder_step(const TextConfig& config, const TextWeights& weights, const DecoderOptions& options,
                    const StepInput& input, const KvCache& cache, Arena& arena, const StepTrace* trace = nullptr,
                    Stream stream = {});

// What a step of these sizes takes from its arena at most.
struct StepSizes {
  int64_t max_tokens = 0;           // T
  int64_t max_sequences = 1;        // N
  int64_t max_logit_rows = 1;       // L
  int64_t max_sequence_tokens = 0;  // longest sequence, new tokens included
};
int64_t decoder_step_bytes(const TextConfig& config, const DecoderOptions& options, const StepSizes& sizes);

}  // namespace m3
