// The parameters of a model as tensors, one struct per block. The same structs hold weights (views into
// the mapped checkpoint), gradients and optimiser state: visit_parameters walks all of them in one order
// under the released names (model.md §3).
//
// C hidden, H query heads, R KV heads, D head dim, X index dim, E experts, F expert width, V vocabulary;
// vision: W tower width, P values of a patch.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "formats/checkpoint.h"
#include "ops/gemm/gemm.h"
#include "ops/moe_experts/moe_experts.h"

namespace m3 {

struct AttentionWeights {
  Tensor norm_C;                    // input_layernorm
  Weight q, k, v;                   // [H·D, C], [R·D, C], [R·D, C]
  Weight o;                         // [C, H·D]
  Tensor q_norm_D, k_norm_D;
  Weight index_q, index_k;          // sparse layers: [R·X, C], [X, C]
  Tensor index_q_norm_X, index_k_norm_X;
};

// Experts, or a dense MLP: then `router_EC` and `routed` are absent and `shared` is the MLP.
struct FfnWeights {
  Tensor norm_C;                    // post_attention_layernorm
  Tensor router_EC, router_bias_E;
  std::vector<ExpertWeights> routed;
  ExpertWeights shared;
};

struct LayerWeights {
  AttentionWeights attention;
  FfnWeights ffn;
};

struct TextWeights {
  Tensor embed_VC;
  std::vector<LayerWeights> layers;
  Tensor norm_C;
  Weight lm_head;                   // [V, C]
};

struct Linear {                     // with bias: vision only
  Weight weight;
  Tensor bias;
};

struct VisionLayerWeights {
  Tensor norm1_W, norm1_bias_W, norm2_W, norm2_bias_W;
  Linear q, k, v, out;              // [W, W]
  Linear fc1, fc2;
};

struct VisionWeights {
  Tensor patch_embed;               // [W, channels, 2, patch, patch]
  Tensor pre_norm_W, pre_norm_bias_W;
  std::vector<VisionLayerWeights> layers;
  Linear project_1, project_2;      // multi_modal_projector: W -> C -> C, per patch
  Linear merge_1, merge_2;          // patch_merge_mlp: 4·C -> C -> C, per 2 x 2 patches
};

struct ModelWeights {
  TextWeights text;
  VisionWeights vision;             // layers empty if the model has no tower
};

// Called for every parameter under its released name. A matrix that checkpoints may hold in 8 bits is a
// Weight, everything else a Tensor.
struct ParameterVisitor {
  std::function<void(const std::string& name, Weight& weight)> matrix;
  std::function<void(const std::string& name, Tensor& tensor)> tensor;
};

// Sizes the vectors of `weights` to the config and visits every parameter once, in a fixed order. Shapes stand in
// tensor_table(config) (formats/tensor_table.h).
void visit_parameters(const ModelConfig& config, ModelWeights& weights, const ParameterVisitor& visitor);

// Visits tensors of any role in the same order, a matrix as its values.
void for_each_parameter(const ModelConfig& config, const ModelWeights& weights,
                        const std::function<void(const std::string& name, const Tensor& tensor)>& body);

// Views of a checkpoint's tensors; it must outlive them.
ModelWeights weights_of(const Checkpoint& checkpoint);

// A full set of tensors from `arena`, one after another in the fixed order: kF32 for gradients, masters and moments;
// kBF16 for compute copies, where parameters that checkpoints store in f32 (router, patch embedding) stay f32.
ModelWeights alloc_parameters(const ModelConfig& config, DType dtype, Arena& arena);
int64_t parameter_bytes(const ModelConfig& config, DType dtype);  // that it takes from the arena

}  // namespace m3
