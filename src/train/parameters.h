// All parameters of a training run in flat memory: fp32 masters, gradients and moments, and the
// bf16 copies that the model reads (training.md §10). Tensors that AdamW treats alike lie side by
// side, so that one call updates them.
//
//   masters    f32, every parameter
//   gradients  f32, every parameter (that of the router bias stays 0)
//   copies     bf16, where the released form is bf16 and products are bf16; the model reads these,
//              else the masters
//   moments    f32 | bf16, only of groups that the run trains: what is frozen or never touched has
//              no state
#pragma once
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/random_init.h"
#include "formats/tensor_table.h"
#include "model/weights.h"
#include "tensor/arena.h"
#include "train/train_config.h"

namespace m3::train {

struct Parameter {
  TensorEntry entry;  // released name, shape and type
  Group group = Group::kText;
  bool is_router_bias = false;  // moved by the balance rule, not by AdamW
  Tensor master, gradient;      // f32
  Tensor copy;                  // bf16 or absent
  Tensor m, v;                  // absent without optimizer state
};

// Consecutive parameters with one decay: the unit of an AdamW call.
struct Segment {
  Group group = Group::kText;
  float weight_decay = 0;
  Tensor master, gradient, copy, m, v;  // flat; copy absent or of the same length
};

// Zeroed memory of the gradients' form, for somebody who computes beside others.
struct GradientCopy {
  Arena arena;
  Tensor flat;           // as Parameters keeps its own
  ModelWeights weights;  // views of it
};

// Norms of gradients by part of the model, before clipping (training.md §11).
struct GradientNorms {
  std::vector<double> layers;  // of the text model, without index branch; routers included
  double embedding = 0, head = 0, routers = 0, tower = 0, projector = 0;
  std::vector<std::string> zeros;  // parameters of trained groups whose gradient is exactly zero
};

using GroupFlags = std::array<bool, kNumGroups>;

class Parameters {
 public:
  // `trained`: groups with optimizer state.
  Parameters(const ModelConfig& config, const OptimizerConfig& optimizer, DType compute,
             const GroupFlags& trained);

  // What the model reads, and where it adds gradients. Views of this object's memory.
  const ModelWeights& weights() const { return weights_; }
  const ModelWeights& gradients() const { return gradients_; }

  const std::vector<Parameter>& all() const { return parameters_; }
  const Parameter& find(std::string_view released_name) const;
  const std::vector<Segment>& segments() const { return segments_; }  // of trained groups
  bool has_state(Group group) const { return trained_[static_cast<int>(group)]; }

  void initialise(const InitScheme& scheme);
  // Masters from a model folder. Returns the parameters that it lacks, which stay as they are.
  std::vector<const Parameter*> load_weights(const Checkpoint& checkpoint);
  void round_copies();  // copies from masters
  void zero_gradients();
  GradientCopy copy_of_gradients() const;  // all zero
  // Adds the copies in their order, and zeroes them.
  void add_gradients(std::span<GradientCopy> copies);
  double gradient_sum_of_squares(Group group) const;
  GradientNorms gradient_norms() const;

  int64_t num_parameters() const;
  void add_to_plan(MemoryPlan& plan) const;

 private:
  ModelWeights gradient_views(const Tensor& flat) const;

  ModelConfig config_;
  GroupFlags trained_;
  Arena masters_arena_, gradients_arena_, copies_arena_, moments_arena_;
  std::vector<Parameter> parameters_;  // in the order of memory
  std::vector<Segment> segments_, all_segments_;
  Tensor flat_gradients_;
  std::unordered_map<std::string_view, size_t> index_;
  ModelWeights weights_, gradients_;
};

Group group_of(const TensorEntry& entry);

}  // namespace m3::train
