#include "train/replicas.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/threads.h"

namespace m3::train {

Replicas::Replicas(const ModelConfig& config, Parameters& parameters, int count,
                   const TrainOptions& options, const TrainSizes& sizes)
    : parameters_(parameters) {
  const SerialScope serial;  // workspaces of one thread
  for (int r = 0; r < count; ++r) {
    gradients_.push_back(parameters.copy_of_gradients());
    models_.push_back(std::make_unique<TrainableModel>(config, parameters.weights(),
                                                       gradients_.back().weights, options, sizes));
  }
}

void Replicas::set_options(const TrainOptions& options) {
  const SerialScope serial;
  for (const auto& model : models_) model->set_options(options);
}

void Replicas::add_to_plan(MemoryPlan& plan) const {
  MemoryPlan one;
  models_[0]->add_to_plan(one);
  const auto count = static_cast<int64_t>(models_.size());
  plan.add(fmt::format("{} replicas", count), count * (one.total_bytes() + gradients_[0].arena.used_bytes()));
}

std::vector<MicroBatchResult> Replicas::forward_backward(
    std::span<const std::vector<PackedDocuments>> packs_R, const Normalisers& global) {
  M3_CHECK(packs_R.size() == models_.size(), "packs for {} replicas, there are {}", packs_R.size(),
           models_.size());
  std::vector<std::vector<MicroBatchResult>> results_R(packs_R.size());
  parallel_for_dynamic(static_cast<int64_t>(packs_R.size()), [&](int64_t r) {
    const SerialScope serial;
    for (const PackedDocuments& pack : packs_R[r])
      results_R[r].push_back(models_[r]->forward_backward(pack.micro_batch(), global));
  });
  parameters_.add_gradients(gradients_);
  std::vector<MicroBatchResult> results;
  for (std::vector<MicroBatchResult>& of_replica : results_R)
    std::move(of_replica.begin(), of_replica.end(), std::back_inserter(results));
  return results;
}

std::vector<std::vector<int32_t>> spread_documents(std::span<const int32_t> documents,
                                                   std::span<const double> work, int count) {
  std::vector<size_t> order(documents.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return work[a] > work[b]; });
  std::vector<std::vector<int32_t>> shares(count);
  std::vector<double> load(count);
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    shares[least - load.begin()].push_back(documents[i]);
    *least += work[i];
  }
  return shares;
}

}  // namespace m3::train
