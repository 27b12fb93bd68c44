// Captured and oracle mass of the sparse selection, by a dense side computation on a sample of
// queries (training.md §9, §11).
#pragma once
#include "train/step_report.h"

namespace m3::train {

// Runs `batch` forward in the sparse stage and compares every sparse layer's selection with the true
// attention of `num_queries` rows spread over the documents longer than the selection. Leaves the
// model's options as they were. Empty if no document is long enough.
std::vector<SelectionQuality> probe_selection(TrainableModel& model, const MicroBatch& batch,
                                              int num_queries);

}  // namespace m3::train
