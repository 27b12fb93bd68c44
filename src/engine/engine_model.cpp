#include "engine/engine_model.h"

namespace m3 {

CpuEngineModel::CpuEngineModel(Model& model, int64_t num_pages) : model_(model), cache_(model.make_cache(num_pages)) {
  const StepSizes& step = model.options().step;
  sizes_.num_pages = cache_.num_pages();
  sizes_.page_tokens = cache_.page_tokens();
  sizes_.page_bytes = cache_.page_bytes();
  sizes_.max_step_tokens = step.max_tokens;
  sizes_.max_sequences = step.max_sequences;
  sizes_.max_logit_rows = step.max_logit_rows;
  sizes_.max_sequence_tokens = step.max_sequence_tokens;
}

std::shared_ptr<const MediaFeatures> CpuEngineModel::encode_media(const MediaInput& media) {
  const DType dtype = model_.activation_dtype();
  const Shape shape = {model_.num_features(media.grid), model_.config().text.hidden_size};
  auto features = std::make_shared<MediaFeatures>();
  features->arena = Arena("media features", shape.numel() * dtype_bytes(dtype) + Arena::kAlignment);
  features->features_MC = features->arena.alloc("features", dtype, shape);
  const Tensor patches_NP(const_cast<float*>(media.patches_NP->data()), DType::kF32,
                          {media.grid.num_patches(), model_.config().vision->patch_numel()});
  model_.encode_media(media.grid, patches_NP, features->features_MC);
  return features;
}

}  // namespace m3
