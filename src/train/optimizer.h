// One optimizer step: norms and clipping by group, AdamW, balance of the experts (training.md §8,
// §10).
#pragma once
#include <array>

#include "train/parameters.h"

namespace m3::train {

struct GroupUpdate {
  double norm = 0;  // of the gradient, before clipping
  double clip_factor = 1;
  double lr = 0;
  bool updated = false;
  double update_ratio = -1;  // norm of the masters' change over theirs; below 0: not measured
};
using GroupUpdates = std::array<GroupUpdate, kNumGroups>;

class Optimizer {
 public:
  Optimizer(Parameters& parameters, const OptimizerConfig& config)
      : parameters_(parameters), config_(config) {}

  // Norms of the gradients of all groups; a group that learns nothing has 0.
  GroupUpdates measure() const;

  // Moves every group with state, `active` flag and a gradient that is not exactly zero: a group
  // that nothing touched in this step (the vision tower in a step without pictures) keeps masters,
  // moments and its count of updates. `lr`: the schedule's; `factors`: of the groups, beside their
  // own. Norms come from measure() and must be finite. `measure_ratio`: fills update_ratio, which
  // takes a copy of one segment at a time.
  void update(double lr, const std::array<double, kNumGroups>& factors, const GroupFlags& active,
              GroupUpdates& updates, bool measure_ratio = false);

  // bias_e += step * sign(mean load - load_e), by layer. load_LE: tokens of the global batch by
  // expert, [L, E].
  void balance_experts(const TextConfig& config, const std::vector<int64_t>& load_LE, double step);

  // Updates made so far, by group: the steps of AdamW's bias correction.
  std::array<int64_t, kNumGroups>& num_updates() { return num_updates_; }
  const std::array<int64_t, kNumGroups>& num_updates() const { return num_updates_; }

 private:
  Parameters& parameters_;
  OptimizerConfig config_;
  std::array<int64_t, kNumGroups> num_updates_ = {};
};

}  // namespace m3::train
