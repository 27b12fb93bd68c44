#include "model/decoder.h"

#include <algorithm>
#include <vector>

#include "base/cpu_features.h"
#include "ops/embed/embed.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

DType DecoderOptions::activation_dtype(const TextConfig& config) const {
  if (activations) return *activations;
  return cpu_isa() == CpuIsa::kAvx512Bf16 && config.hidden_size >= kMinHiddenForBf16 ? dtype : DType::kF32;
}

namespace {

Tensor view(std::span<const int32_t> values) {  // ops take tensors; nobody writes to this one
  return Tensor(const_cast<int32_t*>(values.data()), DType::kI32, {static_cast<int64_t>(values.size())});
}

// One set of tensors serves all layers, each with the parts that its kind uses.
struct StepTensors {
  Tensor x_TC;
  AttentionActs sparse, full;
  FfnActs moe, dense;
};

StepTensors alloc_step(const TextConfig& config, const DecoderOptions& options, int64_t num_tokens, Arena& arena) {
  StepTensors t;
  t.x_TC = arena.alloc("residual", DType::kF32, {num_tokens, config.hidden_size});
  const bool any_sparse = config.num_sparse_layers() > 0, any_moe = config.num_moe_layers() > 0;
  t.sparse = alloc_attention_acts(config, num_tokens, options.activation_dtype(config), options.attention, any_sparse,
                                  Keep::kNothing, arena);
  t.full = t.sparse;
  t.full.qi_raw_TRX = t.full.ki_raw_TX = t.full.qi_TRX = t.full.ki_TX = t.full.lists = Tensor();
  t.moe = alloc_ffn_acts(config, num_tokens, options.activation_dtype(config), any_moe, arena);
  t.dense = t.moe;
  t.dense.scores_TE = t.dense.expert_ids_TK = t.dense.expert_weights_TK = Tensor();
  return t;
}

struct HeadTensors {
  Tensor x_LC, h_LC, logits_LV;
};

HeadTensors alloc_head(const TextConfig& config, const DecoderOptions& options, int64_t num_rows, Arena& arena) {
  HeadTensors t;
  t.x_LC = arena.alloc("rows of the head", DType::kF32, {num_rows, config.hidden_size});
  t.h_LC = arena.alloc("head input", options.activation_dtype(config), {num_rows, config.hidden_size});
  t.logits_LV = arena.alloc("logits", DType::kF32, {num_rows, config.vocab_size});
  return t;
}

MsaBatch batch_of(const StepInput& input) {
  const auto num_seqs = static_cast<int64_t>(input.seq_lens.size());
  M3_CHECK(input.cu_q.size() == input.seq_lens.size() + 1, "cu_q has {} entries for {} sequences", input.cu_q.size(),
           num_seqs);
  M3_CHECK(static_cast<int64_t>(input.page_table.size()) == num_seqs * input.max_pages,
           "the page table has {} entries, want {} sequences x {} pages", input.page_table.size(), num_seqs,
           input.max_pages);
  M3_CHECK(input.cu_q.back() == static_cast<int64_t>(input.ids_T.size()), "cu_q ends at {}, the step has {} tokens",
           input.cu_q.back(), input.ids_T.size());
  MsaBatch batch;
  batch.layout = KvLayout::kPaged;
  batch.num_seqs = static_cast<int>(num_seqs);
  batch.num_queries = input.cu_q.back();
  batch.cu_q = input.cu_q.data();
  batch.seq_lens = input.seq_lens.data();
  batch.page_table = input.page_table.data();
  batch.max_pages = input.max_pages;
  for (int n = 0; n < batch.num_seqs; ++n) {
    batch.max_q_len = std::max(batch.max_q_len, batch.q_len(n));
    batch.max_k_len = std::max(batch.max_k_len, batch.k_len(n));
  }
  return batch;
}

int64_t op_scratch_bytes(const TextConfig& config, int64_t num_tokens, int64_t num_rows, const AttentionStep& step) {
  return std::max({attention_scratch_bytes(config, num_tokens, step), ffn_scratch_bytes(config, num_tokens),
                   gemm_scratch_bytes(num_rows, config.vocab_size, config.hidden_size)});
}

}  // namespace

Tensor decoder_step(const TextConfig& config, const TextWeights& weights, const DecoderOptions& options,
                    const StepInput& input, const KvCache& cache, Arena& arena, const StepTrace* trace,
                    Stream stream) {
  const MsaBatch batch = batch_of(input);
  const auto num_rows = static_cast<int64_t>(input.logit_rows.size());
  const HeadTensors head = alloc_head(config, options, num_rows, arena);
  const StepTensors t = alloc_step(config, options, batch.num_queries, arena);
  const AttentionStep step = plan_attention(config, batch, options.attention, options.dtype, arena, stream);

  embed(view(input.ids_T), weights.embed_VC, t.x_TC, stream);
  for (const FeatureRows& media : input.features) {
    embed_replace(view(media.rows), media.features_MC, t.x_TC, stream);
  }
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const bool sparse = config.is_sparse[layer], moe = config.is_moe[layer];
    const AttentionActs& attention = sparse ? t.sparse : t.full;
    const FfnActs& ffn = moe ? t.moe : t.dense;
    attention_forward(config, weights.layers[layer].attention, sparse, step, &cache.layer(layer), options.gemm,
                      attention, t.x_TC, arena, stream);
    ffn_forward(config, weights.layers[layer].ffn, ffn, t.x_TC, arena, stream);
    if (trace != nullptr && trace->after_layer) {
      trace->after_layer({layer, t.x_TC, attention.lists, ffn.expert_ids_TK, ffn.scores_TE});
    }
  }
  gather_rows(view(input.logit_rows), t.x_TC, head.x_LC, stream);
  rmsnorm(head.x_LC, weights.norm_C, head.h_LC, config.rms_norm_eps, stream);
  gemm(head.h_LC, weights.lm_head, {}, head.logits_LV, options.gemm, arena, stream);
  return head.logits_LV;
}

namespace {

// Bytes of a step of num_seqs sequences of full length: `each` new tokens in all but the last, which takes the rest.
int64_t bytes_of_shape(const TextConfig& config, const DecoderOptions& options, const StepSizes& sizes,
                       int64_t num_seqs, int64_t each) {
  const int64_t num_tokens = sizes.max_tokens;
  const int64_t length = std::max(sizes.max_sequence_tokens, num_tokens);
  const int64_t max_pages = (length + config.block_size - 1) / config.block_size;
  std::vector<int32_t> cu_q, seq_lens(num_seqs, static_cast<int32_t>(length)), pages(num_seqs * max_pages, 0);
  for (int64_t n = 0; n < num_seqs; ++n) cu_q.push_back(static_cast<int32_t>(n * each));
  cu_q.push_back(static_cast<int32_t>(num_tokens));
  const std::vector<int32_t> ids(num_tokens, 0);
  StepInput input;
  input.ids_T = ids;
  input.cu_q = cu_q;
  input.seq_lens = seq_lens;
  input.page_table = pages;
  input.max_pages = max_pages;

  Arena measuring = Arena::measuring("step");
  alloc_head(config, options, sizes.max_logit_rows, measuring);
  alloc_step(config, options, num_tokens, measuring);
  Arena angles("step angles", attention_step_bytes(config, num_tokens, options.attention));
  const AttentionStep step = plan_attention(config, batch_of(input), options.attention, options.dtype, angles);
  return measuring.peak_bytes() + angles.peak_bytes() + Arena::kAlignment +
         op_scratch_bytes(config, num_tokens, sizes.max_logit_rows, step);
}

}  // namespace

int64_t decoder_step_bytes(const TextConfig& config, const DecoderOptions& options, const StepSizes& sizes) {
  // Workspaces are largest where as many rows as possible take the decode path of attention, or none.
  const int64_t num_seqs = std::min(sizes.max_sequences, sizes.max_tokens);
  const int64_t each = std::min<int64_t>(kDecodeQueries, sizes.max_tokens / num_seqs);
  return std::max({bytes_of_shape(config, options, sizes, 1, 0), bytes_of_shape(config, options, sizes, num_seqs, each),
                   bytes_of_shape(config, options, sizes, num_seqs, 1)});
}

}  // namespace m3
