// What a pass needs to know of a micro-batch's rows, checked.
#pragma once
#include <vector>

#include "model/trainable_model.h"

namespace m3 {

// Rows that have a target, and everything about media rows.
struct BatchRows {
  std::vector<int32_t> target_rows, target_ids;
  std::vector<float> target_weights;
  std::vector<int32_t> media_rows;  // of all media, in the order of the features
  std::vector<uint8_t> is_media;    // [T]
  std::vector<VisionGrid> segments;
  int64_t num_patches = 0;
};

// Throws if the arrays of the batch do not fit each other, the model or the media; names what is
// wrong.
BatchRows rows_of(const ModelConfig& config, const MicroBatch& batch);

}  // namespace m3
