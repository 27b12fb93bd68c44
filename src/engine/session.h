// A model opened for generation: memory planned and checked, weights loaded, an engine ready. m3 run, m3 serve
// and m3 bench start here.
#pragma once
#include <memory>
#include <string>

#include "base/progress.h"
#include "engine/engine.h"

namespace m3 {

struct SessionOptions {
  DType dtype = DType::kBF16;
  AttentionMode attention = AttentionMode::kMsa;
  int64_t context_tokens = 0;     // of the cache: prompt and answer of all requests together
  int64_t longest_sequence = 0;   // 0: context_tokens
  int64_t max_step_tokens = kDefaultStepTokens;
  int64_t max_requests = 1;       // that run together
  int64_t max_vision_patches = 0; // of one pass; 0: no media
  // Of all pictures and clips together, where they are known before: their features are planned to the byte, and are
  // all that is kept. 0: as many features as engine.media_cache_bytes.
  int64_t total_patches = 0;
  EngineOptions engine;
  Progress::Mode progress = Progress::Mode::kAuto;

  static constexpr int64_t kDefaultStepTokens = 512;
};

class Session {
 public:
  // Checkpoint and tokenizer must outlive the session. Throws, naming needed and available bytes, if cache
  // and activations do not fit the free memory of the machine.
  Session(const Checkpoint& checkpoint, const Tokenizer& tokenizer, const SessionOptions& options);

  Model& model() { return *model_; }
  Engine& engine() { return *engine_; }
  // Resident memory at the worst: weights, cache, activations, and what the process held before.
  const MemoryPlan& plan() const { return plan_; }
  // "cache  1.2 KiB a token, 64 pages of 128 = 8192 tokens; together 1 x 8192 | 4 x 2048 tokens": a promise, for the
  // engine admits so many requests of so many tokens (prompt and answer). With offloading also what that holds.
  std::string capacity() const;
  double load_seconds() const { return load_seconds_; }

 private:
  MemoryPlan plan_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<CpuEngineModel> engine_model_;
  std::unique_ptr<Engine> engine_;
  double load_seconds_ = 0;
};

}  // namespace m3
