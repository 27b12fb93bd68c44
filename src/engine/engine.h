// The engine: requests in, tokens out. It owns the pages of the model's cache; each step packs the next token of every
// request that is answering and chunks of prompts into one call of the model.
//
// One thread uses an engine (engine_thread.h is the front for many): it submits, calls step() until there is
// nothing to do, and gets the events inside step().
//
// A request's answer does not depend on what else runs, on chunks, on the prefix cache, on preemption or on
// speculation: draws go by seed and position, and the model's rows are the same bits in every batch (docs/serving.md).
#pragma once
#include <deque>
#include <filesystem>
#include <memory>
#include <stdexcept>

#include "engine/engine_model.h"
#include "engine/media_cache.h"
#include "engine/metrics.h"
#include "engine/page_cache.h"
#include "engine/request.h"
#include "text/tokenizer.h"

namespace m3 {

struct EngineOptions {
  int64_t max_step_tokens = 0;    // rows of one step; 0: as many as the model takes
  bool prefix_cache = true;       // keep pages of ended requests and reuse them
  std::filesystem::path offload_dir;  // pages that make room go to a file there, and come back on a hit; empty: no
  int64_t offload_bytes = int64_t{8} << 30;  // most of them
  std::filesystem::path cache_file;   // pages are read from it at the start, and written by save_cache(); empty: no
  int64_t max_waiting = 1024;     // more are refused (QueueFull)
  double max_queue_seconds = 0;   // a request that was never admitted ends with kDeadline after so long; 0: no limit
  double max_step_seconds = 0;    // chunks of prompts are cut so that a step with answers in it takes about so long; 0: no
  int max_draft_tokens = 0;       // speculation by prompt lookup: tokens verified per step and request; 0: off
  int64_t media_cache_bytes = int64_t{256} << 20;  // features of pictures and clips, least recently used go first
};

// submit: the queue is full, or the engine takes no more requests.
struct QueueFull : std::runtime_error {
  using runtime_error::runtime_error;
};
struct EngineStopped : std::runtime_error {
  using runtime_error::runtime_error;
};

class Engine {
 public:
  // The tokenizer tells which ids exist and spells them for stop strings. Both must outlive the engine.
  Engine(EngineModel& model, const Tokenizer& tokenizer, const EngineOptions& options);
  ~Engine();

  // Throws if the request can never run: an empty prompt, ids or media that do not fit the model or each
  // other, more tokens than the context holds (with both numbers); QueueFull if max_waiting are waiting.
  RequestId submit(GenerationRequest request, GenerationCallback callback);
  void cancel(RequestId id);  // takes effect in the next step; unknown ids are ignored

  bool step();  // false: nothing to do

  int64_t num_requests() const { return static_cast<int64_t>(running_.size() + waiting_.size()); }
  std::vector<RequestInfo> requests() const;
  const EngineMetrics& metrics() const { return metrics_; }
  const PageCache& pages() const { return pages_; }
  void check_pages() const;  // throws unless every page is accounted for
  void save_cache();         // pages in memory to options.cache_file, for the next process (page_file.h)

  // The two halves of submit, for EngineThread. prepare() reads only what never changes: any thread may call it.
  struct Sequence;
  std::unique_ptr<Sequence> prepare(GenerationRequest request, GenerationCallback callback) const;
  void enqueue(std::unique_ptr<Sequence> sequence, RequestId id);
  const EngineOptions& options() const { return options_; }
  const EngineModelSizes& sizes() const { return model_.sizes(); }
  int64_t max_request_tokens() const;  // prompt and answer of one request

 private:
  void load_cache();

  struct Plan;
  using SequencePtr = std::unique_ptr<Sequence>;

  // Who runs, and what a step computes (engine_schedule.cpp).
  void admit();
  WaitReason try_admit(Sequence& sequence);
  bool prompt_is_open(RequestId id) const;
  void make_room(std::span<Sequence* const> answering);
  Sequence& pick_victim(Sequence& grower);
  void preempt(Sequence& sequence);
  void plan_step();
  void plan_answers();
  void plan_prompts(int64_t budget);
  void add_part(Sequence& sequence, int64_t num_rows, int64_t num_logits);
  int64_t rows_in_time() const;

  // What becomes of it (engine.cpp).
  void end_overdue(std::chrono::steady_clock::time_point now);
  bool encode_one_media();
  void run_step();
  void draw(size_t part, const Tensor& logits_LV, int64_t first_row);
  void accept_drawn(size_t part);
  void accept_token(Sequence& sequence, int32_t id, std::optional<TokenLogprobs> logprobs, int64_t answered,
                    double gap_seconds);
  void report_prefill(Sequence& sequence);
  void finish(Sequence& sequence, FinishReason reason, std::string error = {});
  bool emit(Sequence& sequence, GenerationEvent event, std::string* error);
  void erase_finished();
  void update_gauges();

  EngineModel& model_;
  const Tokenizer& tokenizer_;
  EngineOptions options_;
  std::unique_ptr<PageTier> tier_;  // null: none
  std::string page_layout_;         // only with a cache file
  PageCache pages_;
  MediaCache media_cache_;
  EngineMetrics metrics_;
  RequestId next_id_ = 1;
  std::deque<SequencePtr> waiting_, running_;  // in the order of arrival; of admission
  std::unique_ptr<Plan> plan_;
  uint64_t rotation_ = 0;       // which of several long prompts comes first in a step
  double seconds_per_row_ = 0;  // of steps that computed prompts, newest weighted most
};

}  // namespace m3
