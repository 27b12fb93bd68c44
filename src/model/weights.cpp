#include "model/weights.h"

#include <map>

#include "formats/tensor_table.h"

namespace m3 {

namespace {

class Walk {
 public:
  Walk(const ModelConfig& config, const ParameterVisitor& visitor) : config_(config), visitor_(visitor) {}

  void text(TextWeights& w) {
    const TextConfig& c = config_.text;
    const std::string model = "language_model.model.";
    tensor(model + "embed_tokens.weight", w.embed_VC);
    w.layers.resize(c.num_layers);
    for (int layer = 0; layer < c.num_layers; ++layer) {
      const std::string prefix = model + "layers." + std::to_string(layer) + ".";
      attention(prefix, c.is_sparse[layer], w.layers[layer].attention);
      ffn(prefix, c, c.is_moe[layer], w.layers[layer].ffn);
    }
    tensor(model + "norm.weight", w.norm_C);
    matrix("language_model.lm_head.weight", w.lm_head);
  }

  void vision(const VisionConfig& v, VisionWeights& w) {
    const std::string tower = "vision_tower.vision_model.";
    tensor(tower + "embeddings.patch_embedding.weight", w.patch_embed);
    norm(tower + "pre_layrnorm", w.pre_norm_W, w.pre_norm_bias_W);
    w.layers.resize(v.num_layers);
    for (int i = 0; i < v.num_layers; ++i) {
      const std::string prefix = tower + "encoder.layers." + std::to_string(i) + ".";
      VisionLayerWeights& layer = w.layers[i];
      norm(prefix + "layer_norm1", layer.norm1_W, layer.norm1_bias_W);
      linear(prefix + "self_attn.q_proj", layer.q);
      linear(prefix + "self_attn.k_proj", layer.k);
      linear(prefix + "self_attn.v_proj", layer.v);
      linear(prefix + "self_attn.out_proj", layer.out);
      norm(prefix + "layer_norm2", layer.norm2_W, layer.norm2_bias_W);
      linear(prefix + "mlp.fc1", layer.fc1);
      linear(prefix + "mlp.fc2", layer.fc2);
    }
    linear("multi_modal_projector.linear_1", w.project_1);
    linear("multi_modal_projector.linear_2", w.project_2);
    linear("patch_merge_mlp.linear_1", w.merge_1);
    linear("patch_merge_mlp.linear_2", w.merge_2);
  }

 private:
  void attention(const std::string& prefix, bool sparse, AttentionWeights& w) {
    const std::string a = prefix + "self_attn.";
    tensor(prefix + "input_layernorm.weight", w.norm_C);
    matrix(a + "q_proj.weight", w.q);
    matrix(a + "k_proj.weight", w.k);
    matrix(a + "v_proj.weight", w.v);
    tensor(a + "q_norm.weight", w.q_norm_D);
    tensor(a + "k_norm.weight", w.k_norm_D);
    if (sparse) {
      matrix(a + "index_q_proj.weight", w.index_q);
      matrix(a + "index_k_proj.weight", w.index_k);
      tensor(a + "index_q_norm.weight", w.index_q_norm_X);
      tensor(a + "index_k_norm.weight", w.index_k_norm_X);
    }
    matrix(a + "o_proj.weight", w.o);
  }

  void ffn(const std::string& prefix, const TextConfig& c, bool moe, FfnWeights& w) {
    tensor(prefix + "post_attention_layernorm.weight", w.norm_C);
    if (!moe) {
      expert(prefix + "mlp.", {"gate_proj", "up_proj", "down_proj"}, w.shared);
      return;
    }
    const std::string m = prefix + "block_sparse_moe.";
    tensor(m + "gate.weight", w.router_EC);
    tensor(m + "e_score_correction_bias", w.router_bias_E);
    w.routed.resize(c.num_experts);
    for (int e = 0; e < c.num_experts; ++e) {
      expert(m + "experts." + std::to_string(e) + ".", {"w1", "w3", "w2"}, w.routed[e]);
    }
    expert(m + "shared_experts.", {"gate_proj", "up_proj", "down_proj"}, w.shared);
  }

  struct ExpertNames {
    const char *gate, *up, *down;
  };
  void expert(const std::string& prefix, const ExpertNames& names, ExpertWeights& w) {
    matrix(prefix + names.gate + ".weight", w.gate_FC);
    matrix(prefix + names.up + ".weight", w.up_FC);
    matrix(prefix + names.down + ".weight", w.down_CF);
  }

  void norm(const std::string& name, Tensor& weight, Tensor& bias) {
    tensor(name + ".weight", weight);
    tensor(name + ".bias", bias);
  }
  void linear(const std::string& name, Linear& w) {
    matrix(name + ".weight", w.weight);
    tensor(name + ".bias", w.bias);
  }
  void matrix(const std::string& name, Weight& w) { visitor_.matrix(name, w); }
  void tensor(const std::string& name, Tensor& t) { visitor_.tensor(name, t); }

  const ModelConfig& config_;
  const ParameterVisitor& visitor_;
};

}  // namespace

void visit_parameters(const ModelConfig& config, ModelWeights& weights, const ParameterVisitor& visitor) {
  Walk walk(config, visitor);
  walk.text(weights.text);
  if (config.vision) walk.vision(*config.vision, weights.vision);
}

ModelWeights weights_of(const Checkpoint& checkpoint) {
  ModelWeights weights;
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string& name, Weight& weight) {
    const StoredWeight& stored = checkpoint.weight(name);
    weight = Weight(stored.data, stored.scales);
  };
  visitor.tensor = [&](const std::string& name, Tensor& tensor) { tensor = checkpoint.weight(name).data; };
  visit_parameters(checkpoint.config(), weights, visitor);
  return weights;
}

void for_each_parameter(const ModelConfig& config, const ModelWeights& weights,
                        const std::function<void(const std::string& name, const Tensor& tensor)>& body) {
  ModelWeights views = weights;
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string& name, Weight& weight) { body(name, weight.values); };
  visitor.tensor = [&](const std::string& name, Tensor& tensor) { body(name, tensor); };
  visit_parameters(config, views, visitor);
}

ModelWeights alloc_parameters(const ModelConfig& config, DType dtype, Arena& arena) {
  M3_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "parameters as {}: only f32 and bf16 can be trained",
           dtype_name(dtype));
  std::map<std::string, TensorEntry> table;
  for (TensorEntry& entry : tensor_table(config)) table.emplace(entry.name, entry);
  const auto make = [&](const std::string& name) {
    const TensorEntry& entry = table.at(name);
    return arena.alloc(name.c_str(), entry.dtype == DType::kF32 ? DType::kF32 : dtype, entry.shape);
  };
  ModelWeights weights;
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string& name, Weight& weight) { weight = make(name); };
  visitor.tensor = [&](const std::string& name, Tensor& tensor) { tensor = make(name); };
  visit_parameters(config, weights, visitor);
  return weights;
}

int64_t parameter_bytes(const ModelConfig& config, DType dtype) {
  Arena measuring = Arena::measuring("parameters");
  alloc_parameters(config, dtype, measuring);
  // So that several sets fit one after another.
  return (measuring.peak_bytes() + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

}  // namespace m3
