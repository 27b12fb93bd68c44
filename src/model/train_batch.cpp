#include "model/train_batch.h"

#include <algorithm>

namespace m3 {

namespace {

void check_batch(const ModelConfig& config, const MicroBatch& batch) {
  const size_t T = batch.ids_T.size();
  M3_CHECK(!batch.cu_seqlens.empty() && batch.cu_seqlens.front() == 0 &&
               batch.cu_seqlens.back() == static_cast<int64_t>(T) &&
               std::ranges::is_sorted(batch.cu_seqlens),
           "cu_seqlens must ascend from 0 to {} tokens", T);
  M3_CHECK(batch.targets_T.size() == T, "{} targets for {} tokens", batch.targets_T.size(), T);
  M3_CHECK(batch.target_weights_T.empty() || batch.target_weights_T.size() == T,
           "{} target weights for {} tokens", batch.target_weights_T.size(), T);
  M3_CHECK(batch.media.empty() || config.vision,
           "the micro-batch has media, the model has no vision tower");
}

}  // namespace

BatchRows rows_of(const ModelConfig& config, const MicroBatch& batch) {
  check_batch(config, batch);
  BatchRows rows;
  for (size_t t = 0; t < batch.targets_T.size(); ++t) {
    if (batch.targets_T[t] < 0) continue;
    rows.target_rows.push_back(static_cast<int32_t>(t));
    rows.target_ids.push_back(batch.targets_T[t]);
    rows.target_weights.push_back(batch.target_weights_T.empty() ? 1.0f
                                                                 : batch.target_weights_T[t]);
  }
  rows.is_media.assign(batch.ids_T.size(), 0);
  for (size_t i = 0; i < batch.media.size(); ++i) {
    const TrainMedia& item = batch.media[i];
    const int64_t want = item.grid.num_patches() / config.vision->merge_factor();
    M3_CHECK(static_cast<int64_t>(item.rows.size()) == want,
             "media item {} has {} placeholder rows, its grid gives {}", i, item.rows.size(), want);
    for (const int32_t row : item.rows) {
      M3_CHECK(
          0 <= row && row < static_cast<int64_t>(rows.is_media.size()) && rows.is_media[row] == 0,
          "media item {}: row {} is outside the pack or belongs to two items", i, row);
      rows.is_media[row] = 1;
      rows.media_rows.push_back(row);
    }
    const Shape patches = {item.grid.num_patches(), config.vision->patch_numel()};
    M3_CHECK(item.patches_NP.dtype() == DType::kF32 && item.patches_NP.shape() == patches,
             "media item {}: patches are {}, its grid wants f32 {}", i,
             item.patches_NP.shape().str(), patches.str());
    for (const VisionGrid& segment : vision_segments(*config.vision, item.grid))
      rows.segments.push_back(segment);
    rows.num_patches += item.grid.num_patches();
  }
  return rows;
}

}  // namespace m3
