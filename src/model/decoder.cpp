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

// The rows whose logits are wanted, alone in the last layer where that is allowed, and in the head.
struct HeadTensors {
  Tensor logits_LV;
  Tensor x_LC, h_LC;
  AttentionActs attention;
  FfnActs ffn;
};

HeadTensors alloc_head(const TextConfig& config, const DecoderOptions& options, int64_t num_rows, bool own_layer,
                       Arena& arena) {
  const DType dtype = options.activation_dtype(config);
  HeadTensors t;
  t.logits_LV = arena.alloc("logits", DType::kF32, {num_rows, config.vocab_size});
  t.x_LC = arena.alloc("rows of the head", DType::kF32, {num_rows, config.hidden_size});
  t.h_LC = arena.alloc("head input", dtype, {num_rows, config.hidden_size});
  if (own_layer) {
    const int last = config.num_layers - 1;
    t.attention = alloc_attention_acts(config, num_rows, dtype, options.attention, config.is_sparse[last],
                                       Keep::kNothing, arena);
    t.ffn = alloc_ffn_acts(config, num_rows, dtype, config.is_moe[last], arena);
  }
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

// If the wanted rows are the last ones of their sequences, and not all: cu_q of a batch with those queries alone.
std::vector<int32_t> tail_of(const StepInput& input) {
  const size_t num_rows = input.logit_rows.size();
  if (num_rows == input.ids_T.size()) return {};
  std::vector<int32_t> cu_q = {0};
  size_t next = 0;
  for (size_t n = 0; n < input.seq_lens.size(); ++n) {
    const size_t first = next;
    while (next < num_rows && input.logit_rows[next] < input.cu_q[n + 1]) ++next;
    for (size_t i = first; i < next; ++i) {
      if (input.logit_rows[i] != input.cu_q[n + 1] - static_cast<int32_t>(next - i)) return {};
    }
    cu_q.push_back(static_cast<int32_t>(next));
  }
  return next == num_rows ? cu_q : std::vector<int32_t>{};
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
  const std::vector<int32_t> tail_cu_q = trace == nullptr ? tail_of(input) : std::vector<int32_t>{};
  const bool own_layer = !tail_cu_q.empty();
  const HeadTensors head = alloc_head(config, options, num_rows, own_layer, arena);
  const StepTensors t = alloc_step(config, options, batch.num_queries, arena);
  const AttentionStep step = plan_attention(config, batch, options.attention, options.dtype, arena, stream);

  embed(view(input.ids_T), weights.embed_VC, t.x_TC, stream);
  for (const FeatureRows& media : input.features) {
    embed_replace(view(media.rows), media.features_MC, t.x_TC, stream);
  }
  for (int layer = 0; layer < config.num_layers - own_layer; ++layer) {
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
  if (own_layer) {
    const int last = config.num_layers - 1;
    const bool sparse = config.is_sparse[last];
    MsaBatch tail_batch = batch;
    tail_batch.cu_q = tail_cu_q.data();
    tail_batch.num_queries = num_rows;
    const AttentionStep tail = plan_attention(config, tail_batch, options.attention, options.dtype, arena, stream);
    attention_forward_last(config, weights.layers[last].attention, sparse, step, tail, cache.layer(last), options.gemm,
                           sparse ? t.sparse : t.full, head.attention, t.x_TC, head.x_LC, arena, stream);
    ffn_forward(config, weights.layers[last].ffn, head.ffn, head.x_LC, arena, stream);
  }
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
  alloc_head(config, options, sizes.max_logit_rows, true, measuring);
  alloc_step(config, options, num_tokens, measuring);
  measuring.alloc_bytes("tail angles", attention_step_bytes(config, sizes.max_logit_rows, options.attention));
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
