#include "engine/engine_model.h"

#include <numeric>

#include "base/rng.h"
#include "base/sha256.h"
#include "model/kv_lanes.h"

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

std::string CpuEngineModel::page_layout() {
  constexpr const char* kKinds[] = {"keys", "values", "index keys"};
  constexpr const char* kAxes[] = {"heads, positions, dim", "heads, positions, dim", "positions, dim"};
  std::string text = fmt::format("lanes version {}\npage of {} positions\n", kKvLanesVersion, sizes_.page_tokens);
  for (const KvLane& lane : kv_lanes(cache_, config().text.num_layers)) {
    const auto kind = static_cast<size_t>(lane.kind);
    text += fmt::format("layer {} {} {} {} = {}\n", lane.layer, kKinds[kind], dtype_name(lane.dtype), kAxes[kind],
                        lane.page_shape.str());
  }
  return text + fmt::format("computes {}\n", fingerprint());  // last: where lanes differ, they are the reason to tell
}

// Hash of the page that the model makes of a fixed text, and of the features of a fixed picture: it tells weights and
// the arithmetic of this machine from others, which names and sizes do not.
std::string CpuEngineModel::fingerprint() {
  const auto count = static_cast<int32_t>(std::min<int64_t>(sizes_.page_tokens, sizes_.max_step_tokens));
  std::vector<int32_t> ids(count);
  Philox rng(1);
  for (int32_t& id : ids) {
    do id = static_cast<int32_t>(rng.below(config().text.vocab_size));
    while (id == config().image_token_id || id == config().video_token_id);
  }
  const std::vector<int32_t> cu_q = {0, count}, lengths = {count}, pages = {0}, rows = {count - 1};
  StepInput input;
  input.ids_T = ids;
  input.cu_q = cu_q;
  input.seq_lens = lengths;
  input.page_table = pages;
  input.max_pages = 1;
  input.logit_rows = rows;
  Sha256 hash;
  hash.update(std::as_bytes(std::span(step(input).ptr<float>(), config().text.vocab_size)));
  std::vector<std::byte> page(sizes_.page_bytes);
  read_page(0, page);
  hash.update(page);
  if (model_.options().max_vision_patches > 0) {
    MediaInput picture;
    const int64_t side = 2 * int64_t{config().vision->spatial_merge_size};
    picture.grid = {1, side, side};
    std::vector<float> patches(side * side * config().vision->patch_numel());
    for (float& value : patches) value = static_cast<float>(rng.uniform());
    picture.patches_NP = std::make_shared<const std::vector<float>>(std::move(patches));
    const auto features = encode_media(picture);
    hash.update({static_cast<const std::byte*>(features->features_MC.data()), static_cast<size_t>(features->bytes())});
  }
  return hash.hex();
}

}  // namespace m3
