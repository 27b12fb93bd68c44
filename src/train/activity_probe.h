// Size of the residual stream, clamped gates and attention entropy of each layer, on one pack
// (training.md §11).
#pragma once
#include "train/step_report.h"

namespace m3::train {

// Runs `batch` forward as the model's options say. Entropy: of `num_queries` rows spread over the
// pack; the other values: of all rows.
std::vector<LayerActivity> probe_activity(TrainableModel& model, const MicroBatch& batch,
                                          int num_queries);

}  // namespace m3::train
