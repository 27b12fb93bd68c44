// Random checkpoints: m3 init, tests and the start of training.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "base/progress.h"
#include "formats/tensor_table.h"

namespace m3 {

// Fills `values` with elements [begin, begin + values.size()) of the tensor, row-major, in fp32; they are rounded
// to the tensor's type afterwards. Called from several threads at once on different pieces of one tensor, so the
// result may depend on the tensor and the position only. Another scheme of initialisation is another such function.
using InitScheme = std::function<void(const TensorEntry& tensor, int64_t begin, std::span<float> values)>;

// model.md §1.2: matrices, embedding, head, router and patch embedding normal with standard deviation `std`; text
// norms (1 + w), biases and the router's correction bias 0; LayerNorm weights 1. Element i of a tensor is normal
// number i of the Philox stream of the tensor's name, whatever else the model holds.
InitScheme init_normal(uint64_t seed, double std = 0.02);

// The generator behind it, for other schemes: unit normals begin, begin + 1, ... of the Philox stream of `name`.
void fill_normal(uint64_t seed, std::string_view name, int64_t begin, std::span<float> values);

// Writes a whole checkpoint of the released form (CheckpointWriter) for this config.json. `extra_files` are copied
// beside it. Memory: a few megabytes, whatever the size of the model.
void write_random_checkpoint(const std::string& config_json, const std::string& config_name,
                             const std::filesystem::path& folder, const InitScheme& scheme,
                             const std::vector<std::filesystem::path>& extra_files = {},
                             Progress::Mode progress = Progress::Mode::kOff);

}  // namespace m3
