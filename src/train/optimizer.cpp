#include "train/optimizer.h"

#include <cmath>
#include <vector>

#include "ops/adamw/adamw.h"

namespace m3::train {

GroupUpdates Optimizer::measure() const {
  GroupUpdates updates;
  for (int i = 0; i < kNumGroups; ++i) {
    updates[i].norm = std::sqrt(parameters_.gradient_sum_of_squares(static_cast<Group>(i)));
  }
  return updates;
}

void Optimizer::update(double lr, const std::array<double, kNumGroups>& factors,
                       const GroupFlags& active, GroupUpdates& updates, bool measure_ratio) {
  for (int i = 0; i < kNumGroups; ++i) {
    GroupUpdate& group = updates[i];
    if (!active[i] || !parameters_.has_state(static_cast<Group>(i)) || group.norm == 0) continue;
    group.updated = true;
    group.clip_factor = clip_factor(group.norm, config_.groups[i].clip);
    group.lr = lr * config_.groups[i].lr_factor * factors[i];
    ++num_updates_[i];
  }
  std::array<double, kNumGroups> moved = {}, size = {};  // sums of squares
  std::vector<float> before;
  for (const Segment& segment : parameters_.segments()) {
    const int i = static_cast<int>(segment.group);
    if (!updates[i].updated) continue;
    AdamW adam;
    adam.lr = static_cast<float>(updates[i].lr);
    adam.beta1 = static_cast<float>(config_.beta1);
    adam.beta2 = static_cast<float>(config_.beta2);
    adam.eps = static_cast<float>(config_.eps);
    adam.weight_decay = segment.weight_decay;
    adam.grad_factor = static_cast<float>(updates[i].clip_factor);
    adam.step = num_updates_[i];
    const float* master = segment.master.ptr<float>();
    if (measure_ratio) before.assign(master, master + segment.master.numel());
    adamw(segment.master, segment.gradient, segment.m, segment.v, segment.copy, adam);
    for (size_t j = 0; measure_ratio && j < before.size(); ++j) {
      moved[i] += std::pow(double{master[j]} - before[j], 2);
      size[i] += double{before[j]} * before[j];
    }
  }
  for (int i = 0; measure_ratio && i < kNumGroups; ++i) {
    if (updates[i].updated && size[i] > 0) updates[i].update_ratio = std::sqrt(moved[i] / size[i]);
  }
}

void Optimizer::balance_experts(const TextConfig& config, const std::vector<int64_t>& load_LE,
                                double step) {
  const int64_t num_experts = config.num_experts;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe[layer]) continue;
    const int64_t* load_E = load_LE.data() + layer * num_experts;
    int64_t total = 0;
    for (int64_t e = 0; e < num_experts; ++e) total += load_E[e];
    float* bias_E = parameters_.weights().text.layers[layer].ffn.router_bias_E.ptr<float>();
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t missing =
          total - load_E[e] * num_experts;  // mean - load, times the number of experts
      if (missing != 0) bias_E[e] += static_cast<float>(missing > 0 ? step : -step);
    }
  }
}

}  // namespace m3::train
