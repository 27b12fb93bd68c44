// The tensors that a model consists of, derived from its configuration: released names, shapes and types
// of model.md §3. From the M3 configuration: 23,416 tensors, 854,172,958,720 bytes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "formats/config.h"
#include "formats/safetensors.h"

namespace m3 {

enum class TensorKind : uint8_t {
  kEmbedding,
  kHead,
  kNorm,            // stored near 0; the model multiplies by 1 + w (model.md §4.1)
  kMatrix,          // of the text model [out, in]; the only kind that MXFP8 checkpoints quantise
  kExpert,          // the same, of one routed expert
  kRouter,          // F32
  kRouterBias,      // F32
  kPatchEmbedding,  // F32
  kVisionMatrix,    // tower and projector [out, in]
  kLayerNorm,       // ordinary weight, near 1
  kBias,            // tower and projector
};

struct TensorEntry : TensorSpec {
  TensorKind kind = TensorKind::kMatrix;
  int layer = -1;   // of the text model or of the tower; -1: outside the layers
  int expert = -1;  // of kExpert
  bool is_vision() const;  // tower or projector
  bool is_quantisable() const { return kind == TensorKind::kMatrix || kind == TensorKind::kExpert; }
};

// In a fixed order: embedding, layers, final norm, head, tower, projector.
std::vector<TensorEntry> tensor_table(const ModelConfig& config);

// What an MXFP8 checkpoint of the released form stores for these tensors (model.md §11.1): quantisable matrices
// as e4m3 of the same shape, each with NAME.weight_scale_inv u8 [out, in / 32]; everything else unchanged.
std::vector<TensorSpec> mxfp8_tensors(const std::vector<TensorEntry>& table);
std::string mxfp8_scale_name(const std::string& weight_name);  // X.weight -> X.weight_scale_inv

int64_t total_bytes(const std::vector<TensorEntry>& table);

struct ParameterCounts {
  int64_t total = 0, text = 0, tower = 0, projector = 0, experts = 0, embedding = 0, head = 0;
  // In the matrices that one text token is multiplied with: routers, attention, index branch, MLPs and the experts
  // chosen; without embedding and head. (Norms and biases would add 3e-5 of it.)
  int64_t active = 0;
};
ParameterCounts count_parameters(const ModelConfig& config, const std::vector<TensorEntry>& table);

}  // namespace m3
