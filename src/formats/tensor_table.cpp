#include "formats/tensor_table.h"

#include "base/check.h"
#include "base/fp8.h"

namespace m3 {
namespace {

// Collects entries with the layer they belong to.
class Table {
 public:
  explicit Table(size_t capacity) { entries_.reserve(capacity); }
  void add(std::string name, Shape shape, TensorKind kind, int layer = -1, int expert = -1) {
    const bool wide = kind == TensorKind::kRouter || kind == TensorKind::kRouterBias || kind == TensorKind::kPatchEmbedding;
    TensorEntry entry;
    entry.name = std::move(name);
    entry.dtype = wide ? DType::kF32 : DType::kBF16;
    entry.shape = shape;
    entry.kind = kind;
    entry.layer = layer;
    entry.expert = expert;
    entries_.push_back(std::move(entry));
  }
  std::vector<TensorEntry> take() { return std::move(entries_); }

 private:
  std::vector<TensorEntry> entries_;
};

void add_text_layer(const TextConfig& c, int layer, Table& table) {
  using enum TensorKind;
  const std::string prefix = fmt::format("language_model.model.layers.{}.", layer);
  const auto add = [&](const std::string& name, Shape shape, TensorKind kind) {
    table.add(prefix + name, shape, kind, layer);
  };
  const int64_t hidden = c.hidden_size, d = c.head_dim;
  add("input_layernorm.weight", {hidden}, kNorm);
  add("post_attention_layernorm.weight", {hidden}, kNorm);
  add("self_attn.q_proj.weight", {c.num_heads * d, hidden}, kMatrix);
  add("self_attn.k_proj.weight", {c.num_kv_heads * d, hidden}, kMatrix);
  add("self_attn.v_proj.weight", {c.num_kv_heads * d, hidden}, kMatrix);
  add("self_attn.o_proj.weight", {hidden, c.num_heads * d}, kMatrix);
  add("self_attn.q_norm.weight", {d}, kNorm);
  add("self_attn.k_norm.weight", {d}, kNorm);
  if (c.is_sparse[layer]) {
    const int64_t dx = c.index_dim;
    add("self_attn.index_q_proj.weight", {c.num_kv_heads * dx, hidden}, kMatrix);
    add("self_attn.index_k_proj.weight", {dx, hidden}, kMatrix);
    add("self_attn.index_q_norm.weight", {dx}, kNorm);
    add("self_attn.index_k_norm.weight", {dx}, kNorm);
  }
  if (!c.is_moe[layer]) {
    const int64_t width = c.dense_intermediate_size;
    add("mlp.gate_proj.weight", {width, hidden}, kMatrix);
    add("mlp.up_proj.weight", {width, hidden}, kMatrix);
    add("mlp.down_proj.weight", {hidden, width}, kMatrix);
    return;
  }
  add("block_sparse_moe.gate.weight", {c.num_experts, hidden}, kRouter);
  add("block_sparse_moe.e_score_correction_bias", {c.num_experts}, kRouterBias);
  for (int e = 0; e < c.num_experts; ++e) {
    const std::string expert = fmt::format("{}block_sparse_moe.experts.{}.", prefix, e);
    const int64_t width = c.expert_intermediate_size;
    table.add(expert + "w1.weight", {width, hidden}, kExpert, layer, e);  // gate
    table.add(expert + "w3.weight", {width, hidden}, kExpert, layer, e);  // up
    table.add(expert + "w2.weight", {hidden, width}, kExpert, layer, e);  // down
  }
  const int64_t width = c.shared_intermediate_size;
  add("block_sparse_moe.shared_experts.gate_proj.weight", {width, hidden}, kMatrix);
  add("block_sparse_moe.shared_experts.up_proj.weight", {width, hidden}, kMatrix);
  add("block_sparse_moe.shared_experts.down_proj.weight", {hidden, width}, kMatrix);
}

void add_linear(Table& table, const std::string& name, int64_t out, int64_t in, int layer = -1) {
  table.add(name + ".weight", {out, in}, TensorKind::kVisionMatrix, layer);
  table.add(name + ".bias", {out}, TensorKind::kBias, layer);
}

void add_layer_norm(Table& table, const std::string& name, int64_t width, int layer = -1) {
  table.add(name + ".weight", {width}, TensorKind::kLayerNorm, layer);
  table.add(name + ".bias", {width}, TensorKind::kBias, layer);
}

void add_vision(const VisionConfig& c, Table& table) {
  const int64_t hidden = c.hidden_size, projection = c.projection_dim;
  const std::string tower = "vision_tower.vision_model.";
  table.add(tower + "embeddings.patch_embedding.weight",
            {hidden, c.num_channels, c.temporal_patch_size, c.patch_size, c.patch_size}, TensorKind::kPatchEmbedding);
  add_layer_norm(table, tower + "pre_layrnorm", hidden);  // misspelt so in the release
  for (int layer = 0; layer < c.num_layers; ++layer) {
    const std::string prefix = fmt::format("{}encoder.layers.{}.", tower, layer);
    add_layer_norm(table, prefix + "layer_norm1", hidden, layer);
    add_layer_norm(table, prefix + "layer_norm2", hidden, layer);
    for (const char* part : {"q", "k", "v", "out"}) {
      add_linear(table, fmt::format("{}self_attn.{}_proj", prefix, part), hidden, hidden, layer);
    }
    add_linear(table, prefix + "mlp.fc1", c.intermediate_size, hidden, layer);
    add_linear(table, prefix + "mlp.fc2", hidden, c.intermediate_size, layer);
  }
  add_linear(table, "multi_modal_projector.linear_1", projection, hidden);
  add_linear(table, "multi_modal_projector.linear_2", projection, projection);
  add_linear(table, "patch_merge_mlp.linear_1", projection, c.merge_factor() * projection);
  add_linear(table, "patch_merge_mlp.linear_2", projection, projection);
}

}  // namespace

bool TensorEntry::is_vision() const {
  return kind == TensorKind::kPatchEmbedding || kind == TensorKind::kVisionMatrix ||
         kind == TensorKind::kLayerNorm || kind == TensorKind::kBias;
}

std::vector<TensorEntry> tensor_table(const ModelConfig& config) {
  const TextConfig& c = config.text;
  const size_t per_layer = 17, per_vision_layer = 16, others = 16;
  Table table(c.num_layers * per_layer + size_t(c.num_moe_layers()) * c.num_experts * 3 +
              (config.vision ? config.vision->num_layers * per_vision_layer : 0) + others);
  table.add("language_model.model.embed_tokens.weight", {c.vocab_size, c.hidden_size}, TensorKind::kEmbedding);
  for (int layer = 0; layer < c.num_layers; ++layer) add_text_layer(c, layer, table);
  table.add("language_model.model.norm.weight", {c.hidden_size}, TensorKind::kNorm);
  table.add("language_model.lm_head.weight", {c.vocab_size, c.hidden_size}, TensorKind::kHead);
  if (config.vision) add_vision(*config.vision, table);
  return table.take();
}

std::string mxfp8_scale_name(const std::string& weight_name) { return weight_name + "_scale_inv"; }

std::vector<TensorSpec> mxfp8_tensors(const std::vector<TensorEntry>& table) {
  std::vector<TensorSpec> stored;
  stored.reserve(table.size() * 2);
  for (const TensorEntry& entry : table) {
    if (!entry.is_quantisable()) {
      stored.push_back(entry);
      continue;
    }
    const int64_t out = entry.shape[0], in = entry.shape[1];
    M3_CHECK(in % kMxBlock == 0, "{} has {} columns, not a multiple of {}: it cannot be stored as MXFP8", entry.name, in,
             kMxBlock);
    stored.push_back({entry.name, DType::kE4M3, entry.shape});
    stored.push_back({mxfp8_scale_name(entry.name), DType::kU8, {out, in / kMxBlock}});
  }
  return stored;
}

int64_t total_bytes(const std::vector<TensorEntry>& table) {
  int64_t bytes = 0;
  for (const TensorEntry& entry : table) bytes += entry.bytes();
  return bytes;
}

ParameterCounts count_parameters(const ModelConfig& config, const std::vector<TensorEntry>& table) {
  ParameterCounts counts;
  for (const TensorEntry& entry : table) {
    const int64_t numel = entry.shape.numel();
    counts.total += numel;
    if (entry.is_vision()) {
      (entry.name.starts_with("vision_tower.") ? counts.tower : counts.projector) += numel;
    } else {
      counts.text += numel;
    }
    switch (entry.kind) {
      case TensorKind::kExpert: counts.experts += numel; break;
      case TensorKind::kEmbedding: counts.embedding += numel; break;
      case TensorKind::kHead: counts.head += numel; break;
      case TensorKind::kMatrix:
      case TensorKind::kRouter: counts.active += numel; break;
      default: break;
    }
  }
  if (config.text.num_experts > 0) {
    counts.active += counts.experts / config.text.num_experts * config.text.num_experts_per_token;
  }
  return counts;
}

}  // namespace m3
