// Loss and gradients of a whole model (training.md §3-§9, msa.md §8) for packed micro-batches:
//
//   L = 1/W Σ w·CE + λ Σ_layers KL_l + α Σ_layers Bal_l + ζ/W Σ w·logZ²
//
// W is the sum of target weights and N the number of KL queries of the whole global batch
// (Normalisers), so the gradients of micro-batches and of ranks are plain sums. The class owns no
// parameters: it reads ModelWeights and adds to gradients of the same form. It knows nothing of
// optimisers, data or schedules.
//
// Per optimiser step: zero the gradients; sum Normalisers over all micro-batches; forward_backward
// each of them.
//
// Deterministic: the same bits for any number of threads (with GemmOptions::batch_invariant), and
// for every level of recomputation. One thread calls an object at a time.
//
// T tokens of a micro-batch, N documents, C hidden, L layers, E experts, P values of a patch.
#pragma once
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "model/attention_block.h"
#include "model/ffn_block.h"
#include "model/vision.h"
#include "model/weights.h"

namespace m3 {

// What the layers with an index branch do (training.md §9, msa.md §8.5, §16), and on which keys the
// KL teaches it. The other layers are full attention in every stage.
enum class TrainStage : uint8_t {
  kWarmup,  // full attention; KL over all visible keys
  kSparse,  // MSA; KL over the selected visible keys
  kFull,    // full attention, index branch unused: the dense baseline
  kWindow,  // sliding window of MSA's budget, index branch unused
  kDsa,     // token lists shared by all heads (lightning indexer); KL over the listed keys
};
const char* train_stage_name(TrainStage stage);  // "warmup", "sparse", "full", "window", "dsa"
AttentionMode attention_mode_of(
    TrainStage stage);  // of inference with what the stage trains (warm-up: kMsa)
bool teaches_index(TrainStage stage);

// msa.md §8.5. `no_index` is TrainStage::kFull with a configuration without sparse layers.
enum class Freeze : uint8_t {
  kNone,
  kIndexOnly,    // KL only; gradients of the backbone and of vision are not computed, nothing is
                 // added to them
  kFrozenIndex,  // no KL; index parameters get nothing
};

enum class Recompute : uint8_t {
  kNone,   // keep what the backward reads
  kLayer,  // keep the residual stream, selection and router choice of each layer; the rest is
           // computed again
};

struct TrainOptions {
  DType dtype = DType::kBF16;  // of products and of activations; f32 computes in fp32 throughout
  std::optional<DType>
      activations;  // unset: bf16 where the CPU multiplies bf16 pairs, else f32 (decoder.h)
  TrainStage stage = TrainStage::kSparse;
  Freeze freeze = Freeze::kNone;
  bool train_vision = true;  // false: tower and projector run forward only
  double lambda = 0;         // of the KL; 0 still reports its value
  // Documents of at most so many tokens take no part in the KL, nor in N (nano.md §4: one block has
  // nothing to select).
  int64_t kl_min_tokens = 0;
  bool detach_index_input = true;  // false only for the experiment of training.md §12.4
  float z_weight = 0;              // zeta
  float balance_alpha = 0;         // sequence-wise balance loss
  Recompute recompute = Recompute::kNone;
  GemmOptions gemm;
};

// A picture or clip of a micro-batch.
struct TrainMedia {
  VisionGrid grid;
  Tensor patches_NP;              // f32 [t·h·w, P]
  std::span<const int32_t> rows;  // of the T rows: the placeholders, one per merged token, in order
};

struct MicroBatch {
  std::span<const int32_t> ids_T;       // of placeholders: any id of the vocabulary
  std::span<const int32_t> cu_seqlens;  // [N + 1]; documents see only themselves, positions restart
  std::span<const int32_t> targets_T;   // the id that row t shall predict, or -1
  std::span<const float> target_weights_T;  // of targets_T; empty: 1
  std::span<const TrainMedia> media;
};

// Sums over the global batch, all micro-batches and ranks (training.md §3).
struct Normalisers {
  double target_weight = 0;  // Σ w of all targets
  int64_t num_tokens = 0;    // all tokens, for the balance loss
  int64_t kl_queries = 0;    // tokens of the documents that take part in the KL
  void add(const Normalisers& other);
};
Normalisers normalisers_of(const MicroBatch& batch, const TrainOptions& options);

// Sums of one or more micro-batches; unweighted by λ, ζ, α, undivided.
struct TrainSums {
  double ce = 0;                  // Σ w·CE
  double logz2 = 0;               // Σ w·logZ²
  double logz = 0, logz_max = 0;  // Σ logZ over targets; the largest
  int64_t num_targets = 0;
  Normalisers counts;
  std::vector<double> kl_L;       // Σ KL rows over queries and groups; 0 in layers without KL
  std::vector<double> balance_L;  // Σ n·Bal over documents (with balance_alpha)
  // Tokens that chose the expert, [L, E]; rows of dense layers are 0. Text and media tokens apart.
  std::vector<int64_t> text_experts_LE, media_experts_LE;

  void add(const TrainSums& other);
};

// The loss L from sums over the global batch, and its parts.
struct TrainLoss {
  double ce = 0, kl = 0, balance = 0, z = 0;  // weighted by λ, α, ζ
  double total() const { return ce + kl + balance + z; }
};
TrainLoss train_loss(const TextConfig& config, const TrainOptions& options, const TrainSums& sums);

struct MicroBatchResult {
  TrainSums sums;
  std::vector<float> loss_T;  // CE of each row's target, unweighted; 0 where there is none
  std::vector<int32_t>
      argmax_T;  // forward_only: the most probable id of each row with a target, else -1
};

// What a layer computed, for instruments (training.md §11); valid during the call.
struct TrainTrace {
  struct Layer {
    int index;
    Tensor x_TC;                     // residual stream after the layer, f32
    const AttentionActs* attention;  // q, k, lse, index q and k, lists (where the stage has them)
    const FfnActs* ffn;              // scores, expert ids
    const AttentionStep* step;
  };
  std::function<void(const Tensor& x_TC)> after_embedding;  // media rows in place
  std::function<void(const Layer&)> after_layer;            // of the forward pass
};

// Upper bounds of a micro-batch, for the memory plan.
struct TrainSizes {
  int64_t max_tokens = 0;   // T
  int64_t max_patches = 0;  // of all media together; 0: no media
};

class TrainableModel {
 public:
  // Weights and gradients are views whose owners must outlive the model. Weights: matrices f32 |
  // bf16 (not 8-bit), router and its bias f32. Gradients: f32 of the same shapes, as
  // alloc_parameters makes them (weights.h); the router bias has none.
  TrainableModel(const ModelConfig& config, const ModelWeights& weights,
                 const ModelWeights& gradients, const TrainOptions& options,
                 const TrainSizes& sizes);

  const ModelConfig& config() const { return config_; }
  const TrainOptions& options() const { return options_; }
  // A new stage, λ or freeze mode from the next call on. Memory is planned again.
  void set_options(const TrainOptions& options);

  // Adds the gradients of this micro-batch. `global` must cover it. Throws on ids or targets
  // outside the vocabulary, documents that do not cover the rows, media whose rows do not fit their
  // grid.
  MicroBatchResult forward_backward(const MicroBatch& batch, const Normalisers& global,
                                    const TrainTrace* trace = nullptr);
  // The same forward pass and losses, plus argmax; gradients are not touched.
  MicroBatchResult forward_only(const MicroBatch& batch, const TrainTrace* trace = nullptr);

  // Lines of the memory plan: activations and workspaces of a step, vision.
  void add_to_plan(MemoryPlan& plan) const;
  int64_t peak_bytes() const { return arena_.peak_bytes(); }  // that any call has used so far

 private:
  void start(const MicroBatch& batch);

  ModelConfig config_;
  ModelWeights weights_, gradients_;
  TrainOptions options_;
  TrainSizes sizes_;
  int64_t text_bytes_ = 0, vision_bytes_ = 0;
  Arena arena_;
};

}  // namespace m3
