// One sequence with its own cache, fed piece by piece: the plainest user of Model::step. Goldens,
// benchmarks and tests use it; requests go through the engine.
#pragma once
#include <span>
#include <vector>

#include "model/model.h"

namespace m3 {

class SequenceRunner {
 public:
  SequenceRunner(Model& model, int64_t max_tokens);

  // Media of the sequence: features_MC[i] replaces the embedding at map.positions[i] (already ordered).
  void set_features(std::vector<int32_t> positions, const Tensor& features_MC);

  // The next tokens. `logit_rows` count from the first of them; the logits are valid until the next step.
  Tensor feed(std::span<const int32_t> ids, std::span<const int32_t> logit_rows, const StepTrace* trace = nullptr);
  Tensor feed(std::span<const int32_t> ids);  // logits of the last token

  int64_t length() const { return length_; }
  void rewind(int64_t length = 0);  // forgets the tokens from there on
  const KvCache& cache() const { return cache_; }

 private:
  Model& model_;
  KvCache cache_;
  std::vector<int32_t> pages_;
  int64_t length_ = 0;
  std::vector<int32_t> feature_positions_;
  Tensor features_MC_;
};

}  // namespace m3
