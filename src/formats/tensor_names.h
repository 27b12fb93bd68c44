// Where a tensor of the released form lies in each of the forms that transformers 5.x saves (model.md §3.3).
#pragma once
#include <string>

#include "formats/tensor_table.h"

namespace m3 {

enum class CheckpointForm { kReleased, kTransformersSave, kTransformersNative };

const char* form_name(CheckpointForm form);

// One tensor, or a contiguous part of a fused one: [experts,] parts x rows, columns.
struct StoredPlace {
  std::string name;
  bool in_experts = false;  // axis 0 of the stored tensor counts the routed experts
  int part = 0, num_parts = 1;  // the rows hold num_parts matrices of equal size; this is number `part`
};

StoredPlace stored_place(const TensorEntry& entry, CheckpointForm form);

}  // namespace m3
