// The engine: requests in, tokens out. It owns the cache and its pages; each step packs one new token of every
// request that is answering and the next chunk of prompts into one call of the model.
//
// One thread uses an engine: it submits, calls step() until there is nothing to do, and gets the
// events inside step(). A request's answer does not depend on what else runs (sampling draws by seed and position;
// model steps are batch invariant), up to the roundings named in ops/attend/attend.h.
#pragma once
#include <deque>
#include <memory>

#include "engine/page_pool.h"
#include "engine/request.h"
#include "engine/stop_strings.h"
#include "model/model.h"
#include "text/tokenizer.h"

namespace m3 {

struct EngineOptions {
  int64_t cache_tokens = 0;     // of all requests together, rounded up to pages
  int64_t max_step_tokens = 0;  // prompt tokens of one step; at most the model's max_tokens
};

class Engine {
 public:
  // The tokenizer tells which ids exist and spells them for stop strings. Both must outlive the engine.
  Engine(Model& model, const Tokenizer& tokenizer, const EngineOptions& options);
  ~Engine();

  // Throws if the request can never run: an empty prompt, ids or media that do not fit the model or each
  // other, more tokens than the cache holds (with both numbers).
  RequestId submit(GenerationRequest request, GenerationCallback callback);
  void cancel(RequestId id);  // takes effect in the next step; unknown ids are ignored

  bool step();  // false: nothing to do
  int64_t num_requests() const { return static_cast<int64_t>(running_.size() + waiting_.size()); }

  const KvCache& cache() const { return cache_; }
  const PagePool& pages() const { return pool_; }

 private:
  struct Running;
  struct Plan;

  void admit();
  void drop_cancelled(std::deque<std::unique_ptr<Running>>& requests);
  Plan plan_step();
  void run_step(Plan& plan);
  void encode_media(Running& request);
  void accept_token(Running& request, std::span<float> logits_V);
  void finish(Running& request, FinishReason reason);
  void emit(Running& request, GenerationEvent event);

  Model& model_;
  const Tokenizer& tokenizer_;
  EngineOptions options_;
  KvCache cache_;
  PagePool pool_;
  RequestId next_id_ = 1;
  std::deque<std::unique_ptr<Running>> waiting_, running_;
};

}  // namespace m3
