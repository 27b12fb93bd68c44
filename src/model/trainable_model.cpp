#include "model/trainable_model.h"

#include <algorithm>
#include <cmath>

#include "base/cpu_features.h"
#include "model/decoder.h"
#include "model/train_batch.h"
#include "model/train_tape.h"
#include "model/vision_backward.h"
#include "ops/elementwise/elementwise.h"
#include "ops/embed/embed.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe_router/moe_router.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

namespace {

// On the CPU untouched memory costs nothing: the plan counts packs of the shapes below, others may
// take a little more.
constexpr int64_t kReserveBytes = int64_t{64} << 20;

// What the text layers do with an index branch in this stage.
AttentionMode running_mode(TrainStage stage) {
  return stage == TrainStage::kWarmup ? AttentionMode::kFull : attention_mode_of(stage);
}

DType activation_dtype(const TextConfig& config, const TrainOptions& options) {
  DecoderOptions decoder;
  decoder.dtype = options.dtype;
  decoder.activations = options.activations;
  return decoder.activation_dtype(config);
}

Tensor view(std::span<const int32_t> values) {  // ops take tensors; nobody writes to this one
  return Tensor(const_cast<int32_t*>(values.data()), DType::kI32,
                {static_cast<int64_t>(values.size())});
}

MsaBatch packed(std::span<const int32_t> cu_seqlens) {
  MsaBatch batch;
  batch.num_seqs = static_cast<int>(cu_seqlens.size()) - 1;
  batch.num_queries = cu_seqlens.back();
  batch.cu_q = batch.cu_k = cu_seqlens.data();
  for (int n = 0; n < batch.num_seqs; ++n)
    batch.max_q_len = std::max(batch.max_q_len, batch.q_len(n));
  batch.max_k_len = batch.max_q_len;
  return batch;
}

void count_experts(const Tensor& ids_TK, const std::vector<uint8_t>& is_media, int64_t* text_E,
                   int64_t* media_E) {
  const int32_t* ids = ids_TK.ptr<int32_t>();
  const int64_t K = ids_TK.dim(1);
  for (int64_t t = 0; t < ids_TK.dim(0); ++t) {
    int64_t* counts = is_media[t] != 0 ? media_E : text_E;
    for (int64_t j = 0; j < K; ++j) ++counts[ids[t * K + j]];
  }
}

// The rows of the head, N <= T of them.
struct HeadTensors {
  Tensor x_NC, h_NC, loss_N, logz_N, argmax_N;
  Tensor dh_NC, dx_NC;
};

HeadTensors alloc_head(const TextConfig& config, int64_t num_rows, DType dtype, bool backward,
                       Arena& arena) {
  const Shape rows = {num_rows, config.hidden_size};
  HeadTensors head;
  head.x_NC = arena.alloc("rows of the head", DType::kF32, rows);
  head.h_NC = arena.alloc("head input", dtype, rows);
  head.loss_N = arena.alloc("losses", DType::kF32, {num_rows});
  head.logz_N = arena.alloc("logz", DType::kF32, {num_rows});
  if (!backward) {
    head.argmax_N = arena.alloc("argmax", DType::kI32, {num_rows});
    return head;
  }
  head.dh_NC = arena.alloc("dh of the head", dtype, rows);
  head.dx_NC = arena.alloc("dx of the head", DType::kF32, rows);
  return head;
}

int64_t text_scratch_bytes(const TextConfig& config, int64_t num_tokens, DType dtype,
                           const AttentionStep& step, const AttentionBackwardStep* backward) {
  int64_t bytes = std::max({attention_scratch_bytes(config, num_tokens, step),
                            ffn_scratch_bytes(config, num_tokens),
                            linear_cross_entropy_scratch_bytes(num_tokens, config.vocab_size)});
  if (backward == nullptr) return bytes;
  return std::max({bytes, attention_backward_scratch_bytes(config, num_tokens, dtype, *backward),
                   ffn_backward_scratch_bytes(config, num_tokens, dtype),
                   rmsnorm_backward_scratch_bytes(num_tokens, config.hidden_size)});
}

// One forward pass and, if asked for, its backward.
class Pass {
 public:
  Pass(const ModelConfig& config, const ModelWeights& weights, const TrainOptions& options,
       const MicroBatch& batch, Arena& arena, const TrainTrace* trace)
      : config_(config),
        text_(config.text),
        weights_(weights),
        options_(options),
        batch_(batch),
        arena_(arena),
        trace_(trace),
        dtype_(activation_dtype(config.text, options)) {
    rows_ = rows_of(config, batch);
    choose_kl_documents();
  }

  MicroBatchResult run(const Normalisers* global, const ModelWeights* gradients) {
    const int L = text_.num_layers;
    TrainSums& sums = result_.sums;
    sums.counts = normalisers_of(batch_, options_);
    sums.kl_L.assign(L, 0);
    sums.balance_L.assign(L, 0);
    sums.text_experts_LE.assign(int64_t{L} * text_.num_experts, 0);
    sums.media_experts_LE = sums.text_experts_LE;
    result_.loss_T.assign(batch_.ids_T.size(), 0);
    if (gradients == nullptr) result_.argmax_T.assign(batch_.ids_T.size(), -1);
    if (batch_.ids_T.empty()) return std::move(result_);

    global_ = global;
    gradients_ = gradients;
    if (gradients != nullptr) check_normalisers();
    forward();
    head();
    if (gradients != nullptr) backward();
    return std::move(result_);
  }

 private:
  bool index_only() const { return options_.freeze == Freeze::kIndexOnly; }
  bool trains_backbone() const { return gradients_ != nullptr && !index_only(); }
  bool has_media() const { return rows_.num_patches > 0; }

  void choose_kl_documents() {
    if (!teaches_index(options_.stage) || options_.freeze == Freeze::kFrozenIndex) return;
    std::vector<uint8_t> takes_part;
    for (size_t n = 1; n < batch_.cu_seqlens.size(); ++n) {
      takes_part.push_back(batch_.cu_seqlens[n] - batch_.cu_seqlens[n - 1] >
                           options_.kl_min_tokens);
    }
    // A pack in which nobody takes part needs no KL; one whose documents all do needs no marks, but
    // they do no harm.
    if (std::ranges::find(takes_part, 1) != takes_part.end()) kl_documents_ = std::move(takes_part);
  }

  void check_normalisers() const {
    const Normalisers& here = result_.sums.counts;
    M3_CHECK(global_->target_weight >= here.target_weight * (1 - 1e-9) &&
                 global_->num_tokens >= here.num_tokens && global_->kl_queries >= here.kl_queries,
             "normalisers of the global batch ({} target weight, {} tokens, {} KL queries) are "
             "smaller than those of this "
             "micro-batch ({}, {}, {}): sum them over all micro-batches first",
             global_->target_weight, global_->num_tokens, global_->kl_queries, here.target_weight,
             here.num_tokens, here.kl_queries);
  }

  void forward() {
    const MsaBatch packed_batch = packed(batch_.cu_seqlens);
    const bool teach_index = !kl_documents_.empty();
    TapeShape shape{packed_batch.num_queries, dtype_, running_mode(options_.stage), teach_index,
                    TapeUse::kForwardOnly};
    if (gradients_ != nullptr) {
      shape.use = options_.recompute == Recompute::kLayer ? TapeUse::kRecompute : TapeUse::kKeep;
    }
    shape.keep_gates = gradients_ == nullptr && trace_ != nullptr && trace_->after_layer != nullptr;
    tape_ = alloc_train_tape(text_, shape, arena_);
    step_ =
        plan_attention(text_, packed_batch, shape.mode, options_.dtype, arena_, {}, teach_index);
    if (gradients_ != nullptr) {
      const auto queries = static_cast<double>(global_->kl_queries);
      backward_step_ = plan_attention_backward(text_, step_, kl_documents_,
                                               queries > 0 ? options_.lambda / queries : 0);
    }

    const Tensor x_TC = tape_.layers.empty() ? tape_.x_TC : tape_.layers[0].x_TC;
    embed(view(batch_.ids_T), weights_.text.embed_VC, x_TC);
    if (has_media()) embed_replace(view(rows_.media_rows), media_features(), x_TC);
    if (trace_ != nullptr && trace_->after_embedding) trace_->after_embedding(x_TC);
    for (int l = 0; l < text_.num_layers; ++l) {
      layer_forward(text_, weights_.text.layers[l], l, step_, options_.gemm, tape_, arena_);
      const LayerTape& layer = tape_.layers[l];
      if (text_.is_moe[l]) {
        const int64_t first = int64_t{l} * text_.num_experts;
        count_experts(layer.ffn.expert_ids_TK, rows_.is_media,
                      result_.sums.text_experts_LE.data() + first,
                      result_.sums.media_experts_LE.data() + first);
      }
      if (trace_ != nullptr && trace_->after_layer) {
        const Tensor& out = l + 1 < text_.num_layers ? tape_.layers[l + 1].x_TC : tape_.x_TC;
        trace_->after_layer({l, out, &layer.attention, &layer.ffn, &step_});
      }
    }
  }

  Tensor media_features() {
    vision_ =
        alloc_vision_tape(config_, rows_.num_patches, dtype_,
                          gradients_ == nullptr || options_.recompute == Recompute::kLayer, arena_);
    vision_.patches_NP =
        arena_.alloc("patches", DType::kF32, {rows_.num_patches, config_.vision->patch_numel()});
    int64_t first = 0;
    for (const TrainMedia& item : batch_.media) {
      const int64_t count = item.grid.num_patches();
      copy(item.patches_NP, vision_.patches_NP.rows(first, first + count));
      first += count;
    }
    return vision_train_forward(config_, weights_.vision, rows_.segments, options_.gemm, vision_,
                                arena_);
  }

  // Losses of all rows with a target and, on the way, dx of the last layer.
  void head() {
    const auto num_rows = static_cast<int64_t>(rows_.target_rows.size());
    if (trains_backbone()) {
      dx_TC_ = arena_.alloc("dx", DType::kF32, tape_.x_TC.shape());
      fill_zero(dx_TC_);
    }
    if (num_rows == 0) return;
    const HeadTensors t = alloc_head(text_, num_rows, dtype_, gradients_ != nullptr, arena_);
    const Tensor rows = view(rows_.target_rows);
    gather_rows(rows, tape_.x_TC, t.x_NC);
    rmsnorm(t.x_NC, weights_.text.norm_C, t.h_NC, text_.rms_norm_eps);
    LinearCrossEntropy loss;
    loss.z_weight = options_.z_weight;
    loss.weights_N = Tensor(rows_.target_weights.data(), DType::kF32, {num_rows});
    loss.argmax_N = t.argmax_N;
    if (trains_backbone()) {
      M3_CHECK(global_->target_weight > 0, "the targets of the global batch have weight {}",
               global_->target_weight);
      loss.factor = static_cast<float>(1.0 / global_->target_weight);
      linear_cross_entropy(t.h_NC, weights_.text.lm_head.values, view(rows_.target_ids), loss,
                           t.loss_N, t.logz_N, t.dh_NC, gradients_->text.lm_head.values, arena_);
      rmsnorm_backward(t.x_NC, weights_.text.norm_C, t.dh_NC, text_.rms_norm_eps, t.dx_NC, false,
                       gradients_->text.norm_C, arena_);
      embed_replace(rows, t.dx_NC, dx_TC_);
    } else {
      linear_cross_entropy(t.h_NC, weights_.text.lm_head.values, view(rows_.target_ids), loss,
                           t.loss_N, t.logz_N, {}, {}, arena_);
    }
    sum_losses(t);
  }

  void sum_losses(const HeadTensors& t) {
    TrainSums& sums = result_.sums;
    for (size_t n = 0; n < rows_.target_rows.size(); ++n) {
      const double weight = rows_.target_weights[n], loss = t.loss_N.ptr<float>()[n],
                   logz = t.logz_N.ptr<float>()[n];
      sums.ce += weight * loss;
      sums.logz2 += weight * logz * logz;
      sums.logz += logz;
      sums.logz_max = sums.num_targets == 0 ? logz : std::max(sums.logz_max, logz);
      ++sums.num_targets;
      result_.loss_T[rows_.target_rows[n]] = static_cast<float>(loss);
      if (t.argmax_N.defined())
        result_.argmax_T[rows_.target_rows[n]] = t.argmax_N.ptr<int32_t>()[n];
    }
  }

  void backward() {
    for (int l = text_.num_layers; l-- > 0;) layer_backward(l);
    if (!trains_backbone()) return;
    const Tensor skip_T(rows_.is_media.data(), DType::kU8,
                        {static_cast<int64_t>(rows_.is_media.size())});
    embed_backward(view(batch_.ids_T), skip_T, dx_TC_, gradients_->text.embed_VC);
    if (has_media() && options_.train_vision) {
      ArenaScope scope(arena_);
      const Tensor dfeatures = arena_.alloc("dfeatures", DType::kF32, vision_.features_MC.shape());
      gather_rows(view(rows_.media_rows), dx_TC_, dfeatures);
      vision_backward(config_, weights_.vision, options_.gemm, vision_, dfeatures,
                      gradients_->vision, arena_);
    }
  }

  void layer_backward(int l) {
    const bool sparse = text_.is_sparse[l], kl = sparse && backward_step_.has_kl;
    if (!trains_backbone() && !kl) return;
    const LayerWeights& weights = weights_.text.layers[l];
    const LayerWeights& gradients = gradients_->text.layers[l];
    const LayerTape& t = tape_.layers[l];
    ArenaScope scope(arena_);
    if (tape_.use == TapeUse::kRecompute) {
      layer_again(text_, weights, l, step_, options_.gemm, tape_, trains_backbone(), arena_);
    }
    if (trains_backbone())
      ffn_backward(text_, weights.ffn, t.ffn, balance_gradient(l), t.mid_TC, dx_TC_, gradients.ffn,
                   arena_);
    Tensor index_dh_TC;
    if (kl) {
      if (!options_.detach_index_input && trains_backbone()) {
        index_dh_TC = arena_.alloc("dh of the index branch", DType::kF32, dx_TC_.shape());
        fill_zero(index_dh_TC);
      }
      result_.sums.kl_L[l] =
          index_loss(text_, weights.attention, step_, backward_step_, options_.gemm, t.attention,
                     index_dh_TC, gradients.attention, arena_);
    }
    if (trains_backbone()) {
      attention_backward(text_, weights.attention, sparse, step_, backward_step_, options_.gemm,
                         t.attention, t.x_TC, dx_TC_, index_dh_TC, gradients.attention, arena_);
    }
  }

  // Of the balance loss, or absent.
  Tensor balance_gradient(int l) {
    if (!text_.is_moe[l] || options_.balance_alpha == 0) return {};
    const FfnActs& ffn = tape_.layers[l].ffn;
    const Tensor dscores_TE = arena_.alloc("dscores", DType::kF32, ffn.scores_TE.shape());
    fill_zero(dscores_TE);
    const double factor = options_.balance_alpha / static_cast<double>(global_->num_tokens);
    result_.sums.balance_L[l] =
        moe_balance_loss(ffn.scores_TE, ffn.expert_ids_TK, batch_.cu_seqlens,
                         static_cast<float>(factor), dscores_TE);
    return dscores_TE;
  }

  const ModelConfig& config_;
  const TextConfig& text_;
  const ModelWeights& weights_;
  const TrainOptions& options_;
  const MicroBatch& batch_;
  Arena& arena_;
  const TrainTrace* trace_;
  const DType dtype_;
  BatchRows rows_;
  std::vector<uint8_t> kl_documents_;  // empty: no KL
  const Normalisers* global_ = nullptr;
  const ModelWeights* gradients_ = nullptr;

  TrainTape tape_;
  VisionTape vision_;
  AttentionStep step_;
  AttentionBackwardStep backward_step_;
  Tensor dx_TC_;
  MicroBatchResult result_;
};

// Bytes of a pack of `num_tokens` in documents of `length`.
int64_t text_bytes_of(const TextConfig& config, const TrainOptions& options, int64_t num_tokens,
                      int64_t length) {
  std::vector<int32_t> cu_seqlens = {0};
  while (cu_seqlens.back() < num_tokens) {
    cu_seqlens.push_back(
        static_cast<int32_t>(std::min<int64_t>(num_tokens, cu_seqlens.back() + length)));
  }
  const MsaBatch batch = packed(cu_seqlens);
  const bool teach = teaches_index(options.stage) && options.freeze != Freeze::kFrozenIndex;
  const DType dtype = activation_dtype(config, options);
  const TapeUse use = options.recompute == Recompute::kLayer ? TapeUse::kRecompute : TapeUse::kKeep;
  Arena measuring = Arena::measuring("training step");
  alloc_train_tape(config, {num_tokens, dtype, running_mode(options.stage), teach, use}, measuring);
  alloc_head(config, num_tokens, dtype, true, measuring);
  measuring.alloc("dx", DType::kF32, {num_tokens, config.hidden_size});
  measuring.alloc("dh of the index branch", DType::kF32, {num_tokens, config.hidden_size});
  measuring.alloc("dscores", DType::kF32, {num_tokens, std::max(1, config.num_experts)});
  Arena angles("step angles",
               attention_step_bytes(config, num_tokens, running_mode(options.stage), teach));
  const AttentionStep step =
      plan_attention(config, batch, running_mode(options.stage), options.dtype, angles, {}, teach);
  const std::vector<uint8_t> all(teach ? batch.num_seqs : 0, 1);
  const AttentionBackwardStep backward = plan_attention_backward(config, step, all, 1);
  return measuring.peak_bytes() + angles.peak_bytes() +
         text_scratch_bytes(config, num_tokens, dtype, step, &backward) + 4 * Arena::kAlignment;
}

void check_parameters(const ModelConfig& config, const ModelWeights& weights,
                      const ModelWeights& gradients) {
  std::vector<Tensor> shapes;
  for_each_parameter(config, weights, [&](const std::string& name, const Tensor& w) {
    M3_CHECK(w.defined() && (w.dtype() == DType::kF32 || w.dtype() == DType::kBF16),
             "{}: only f32 and bf16 weights can be trained, got {}", name,
             w.defined() ? dtype_name(w.dtype()) : "nothing");
    shapes.push_back(w);
  });
  size_t i = 0;
  for_each_parameter(config, gradients, [&](const std::string& name, const Tensor& g) {
    M3_CHECK(g.defined() && g.dtype() == DType::kF32 && g.shape() == shapes[i].shape(),
             "gradient of {}: want f32 {}, got {} {}", name, shapes[i].shape().str(),
             g.defined() ? dtype_name(g.dtype()) : "nothing", g.defined() ? g.shape().str() : "");
    ++i;
  });
}

}  // namespace

TrainableModel::TrainableModel(const ModelConfig& config, const ModelWeights& weights,
                               const ModelWeights& gradients, const TrainOptions& options,
                               const TrainSizes& sizes)
    : config_(config), weights_(weights), gradients_(gradients), sizes_(sizes) {
  M3_CHECK(sizes.max_tokens > 0, "max_tokens is {}", sizes.max_tokens);
  M3_CHECK(sizes.max_patches == 0 || config.vision,
           "max_patches is {}, the model has no vision tower", sizes.max_patches);
  check_parameters(config_, weights_, gradients_);
  set_options(options);
}

void TrainableModel::set_options(const TrainOptions& options) {
  options_ = options;
  text_bytes_ = 0;
  // Workspaces are largest for one long document, or where every document takes the decode path of
  // attention.
  for (const int64_t length : {sizes_.max_tokens, int64_t{kDecodeQueries}, int64_t{1}}) {
    text_bytes_ =
        std::max(text_bytes_, text_bytes_of(config_.text, options, sizes_.max_tokens, length));
  }
  vision_bytes_ = 0;
  if (sizes_.max_patches > 0) {
    const int64_t N = sizes_.max_patches, C = config_.text.hidden_size;
    vision_bytes_ = vision_train_bytes(config_, N, activation_dtype(config_.text, options),
                                       options.recompute == Recompute::kLayer) +
                    N * 4 * (config_.vision->patch_numel() + C) + 2 * Arena::kAlignment;
  }
  arena_ = Arena("training step", text_bytes_ + vision_bytes_ + kReserveBytes);
}

void TrainableModel::start(const MicroBatch& batch) {
  const auto num_tokens = static_cast<int64_t>(batch.ids_T.size());
  int64_t num_patches = 0;
  for (const TrainMedia& item : batch.media) num_patches += item.grid.num_patches();
  M3_CHECK(num_tokens <= sizes_.max_tokens && num_patches <= sizes_.max_patches,
           "a micro-batch of {} tokens and {} patches; memory was planned for {} and {}",
           num_tokens, num_patches, sizes_.max_tokens, sizes_.max_patches);
  arena_.reset();
}

MicroBatchResult TrainableModel::forward_backward(const MicroBatch& batch,
                                                  const Normalisers& global,
                                                  const TrainTrace* trace) {
  start(batch);
  return Pass(config_, weights_, options_, batch, arena_, trace).run(&global, &gradients_);
}

MicroBatchResult TrainableModel::forward_only(const MicroBatch& batch, const TrainTrace* trace) {
  start(batch);
  return Pass(config_, weights_, options_, batch, arena_, trace).run(nullptr, nullptr);
}

void TrainableModel::add_to_plan(MemoryPlan& plan) const {
  plan.add("activations and workspaces", text_bytes_);
  if (vision_bytes_ > 0) plan.add("vision activations", vision_bytes_);
}

}  // namespace m3
