// Documents of a step side by side: R replicas of the model, each on one thread with gradients of its own, which
// are then added up in the order of the replicas. For small models on many cores: inside one operator a few
// thousand tokens feed about eight threads, while documents are independent until the update.
//
// The split is a function of the documents and of R, so runs repeat to the bit on any number of threads; another R
// is another order of sums.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "model/trainable_model.h"
#include "train/batch.h"
#include "train/parameters.h"

namespace m3::train {

class Replicas {
 public:
  // `parameters` must outlive the object. `sizes`: of a micro-batch of one replica.
  Replicas(const ModelConfig& config, Parameters& parameters, int count,
           const TrainOptions& options, const TrainSizes& sizes);

  void set_options(const TrainOptions& options);
  void add_to_plan(MemoryPlan& plan) const;

  // Runs packs_R[r] on replica r and adds all gradients to those of the parameters. Results in the order of the
  // packs, replica by replica.
  std::vector<MicroBatchResult> forward_backward(
      std::span<const std::vector<PackedDocuments>> packs_R, const Normalisers& global);

 private:
  Parameters& parameters_;
  std::vector<GradientCopy> gradients_;
  std::vector<std::unique_ptr<TrainableModel>> models_;
};

// Documents for each of `count` replicas: the one with the most work first, each to the replica with the least so
// far. `work`: of the documents listed in `documents`.
std::vector<std::vector<int32_t>> spread_documents(std::span<const int32_t> documents,
                                                   std::span<const double> work, int count);

}  // namespace m3::train
