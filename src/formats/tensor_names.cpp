#include "formats/tensor_names.h"

#include <string_view>

namespace m3 {
namespace {

bool replace(std::string& text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) return false;
  text.replace(at, from.size(), to);
  return true;
}

StoredPlace native_place(const TensorEntry& entry) {
  StoredPlace place{entry.name};
  std::string& name = place.name;
  if (replace(name, "vision_tower.vision_model.", "model.vision_tower.")) {
    replace(name, ".encoder.layers.", ".layers.");
    replace(name, ".patch_embedding.", ".proj.");
    return place;
  }
  if (replace(name, "patch_merge_mlp.", "model.multi_modal_projector.merge_")) return place;
  if (replace(name, "multi_modal_projector.", "model.multi_modal_projector.")) return place;
  if (replace(name, "language_model.lm_head.", "lm_head.")) return place;

  replace(name, "language_model.model.", "model.language_model.");
  replace(name, ".self_attn.index_", ".self_attn.indexer.");
  replace(name, ".block_sparse_moe.e_score_", ".block_sparse_moe.gate.e_score_");
  replace(name, ".block_sparse_moe.", ".mlp.");
  if (entry.kind == TensorKind::kExpert) {
    place.in_experts = true;
    const size_t experts = name.find(".experts.") + 9;
    const bool down = name.ends_with(".w2.weight");
    place.part = name.ends_with(".w3.weight");  // gate (w1) first, then up (w3)
    place.num_parts = down ? 1 : 2;
    name.replace(experts, std::string::npos, down ? "down_proj" : "gate_up_proj");
  } else if (name.find(".mlp.") != std::string::npos) {  // dense MLP and shared expert
    place.part = replace(name, ".up_proj.", ".gate_up_proj.");
    place.num_parts = place.part == 1 || replace(name, ".gate_proj.", ".gate_up_proj.") ? 2 : 1;
  }
  return place;
}

}  // namespace

const char* form_name(CheckpointForm form) {
  switch (form) {
    case CheckpointForm::kReleased: return "released";
    case CheckpointForm::kTransformersSave: return "transformers save";
    case CheckpointForm::kTransformersNative: return "transformers native";
  }
  return "?";
}

StoredPlace stored_place(const TensorEntry& entry, CheckpointForm form) {
  if (form == CheckpointForm::kTransformersNative) return native_place(entry);
  StoredPlace place{entry.name};
  // Its reverse renaming is too eager: every MLP that is not a MoE, in text and tower, gets the MoE's name.
  if (form == CheckpointForm::kTransformersSave) replace(place.name, ".mlp.", ".block_sparse_moe.");
  return place;
}

}  // namespace m3
