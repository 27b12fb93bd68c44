// A whole M3 model: configuration, weights, the memory of a step, vision and text forward passes.
// Engine and trainer build on this; one thread calls a model at a time.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "formats/checkpoint.h"
#include "model/decoder.h"
#include "model/vision.h"

namespace m3 {

struct ModelOptions {
  DecoderOptions decoder;
  StepSizes step;
  // Most patches of one pass of the vision tower; a segment is never cut, so it must fit. 0: no media.
  int64_t max_vision_patches = 0;
};

class Model {
 public:
  // The checkpoint must outlive the model: weights are views of its files.
  Model(const Checkpoint& checkpoint, const ModelOptions& options);
  // Weights of any other origin, for the trainer; they must outlive the model likewise.
  Model(const ModelConfig& config, ModelWeights weights, const ModelOptions& options);

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  const ModelOptions& options() const { return options_; }

  KvCache make_cache(int64_t num_pages) const;

  DType activation_dtype() const { return options_.decoder.activation_dtype(config_.text); }

  // One step over a batch (decoder.h). The logits are valid until the next call.
  Tensor step(const StepInput& input, const KvCache& cache, const StepTrace* trace = nullptr);

  // Rows of the vision tower: patches [t*h*w, P] f32 of one picture or clip -> features [tokens, C] in
  // activation_dtype(). A clip runs in passes of whole segments. `tower` sees each pass.
  void encode_media(const VisionGrid& grid, const Tensor& patches_NP, const Tensor& features_MC,
                    const std::function<void(const Tensor& x_NW)>& tower = {});
  int64_t num_features(const VisionGrid& grid) const;

  // Lines of the memory plan for what this class holds: weights, activations, vision.
  void add_to_plan(MemoryPlan& plan) const;
  int64_t weight_bytes() const { return weight_bytes_; }

  // Reads every weight page once, so that the first step does not wait for the disk; `on_bytes` gets
  // the bytes done so far. Later calls find the pages in memory.
  void load(const std::function<void(int64_t done_bytes)>& on_bytes = {}) const;

 private:
  ModelConfig config_;
  ModelWeights weights_;
  ModelOptions options_;
  int64_t weight_bytes_ = 0, step_bytes_ = 0, vision_bytes_ = 0;
  Arena step_arena_, vision_arena_;
};

// Patches of the longest pass that this grid needs: of one attention segment.
int64_t vision_pass_patches(const VisionConfig& config, const VisionGrid& grid);

// Where media features go (model.md §9): rows at image placeholders take the features of the images in
// order, rows at video placeholders those of the videos. Returns, for every placeholder position of
// `ids` in ascending order, the feature row; rows of item i begin at first_row[i].
struct PlaceholderItem {
  bool is_video = false;
  int64_t num_features = 0;
};
struct PlaceholderMap {
  std::vector<int32_t> positions;  // of placeholders, ascending
  std::vector<int32_t> order;      // order[i]: which feature row (items one after another) goes to positions[i]
};
// Throws naming both counts if they differ.
PlaceholderMap map_placeholders(const ModelConfig& config, std::span<const int32_t> ids,
                                std::span<const PlaceholderItem> items);

}  // namespace m3
