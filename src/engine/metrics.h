// What the engine counts. Plain values of the engine's thread; a server copies them and gives them the names of
// serving.md §15.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"

namespace m3 {

// Counts of values by upper bound (inclusive), as Prometheus wants them, but not yet summed up.
class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds)
      : bounds_(bounds.begin(), bounds.end()), counts_(bounds.size() + 1) {}
  void add(double value);

  std::span<const double> bounds() const { return bounds_; }       // ascending, without +inf
  std::span<const int64_t> counts() const { return counts_; }      // one more: above the last bound
  int64_t count() const { return count_; }
  double sum() const { return sum_; }

 private:
  std::vector<double> bounds_;
  std::vector<int64_t> counts_;
  int64_t count_ = 0;
  double sum_ = 0;
};

struct EngineMetrics {
  // Gauges
  int64_t running = 0, waiting = 0;
  int64_t pages_total = 0, pages_free = 0, pages_cached = 0, pages_used = 0;  // cached: reusable and evictable
  int64_t page_bytes = 0;
  int64_t offload_slots = 0, offload_used = 0;  // pages that the second tier has room for; that it holds
  int64_t media_cache_bytes = 0;
  std::array<int64_t, kWaitReasonNames.size()> waiting_by_reason = {};

  // Counters
  int64_t prompt_tokens = 0;      // of requests whose prompt is done, cached ones included
  int64_t computed_prompt_tokens = 0;  // prompt rows of model steps; more than the above where work was repeated
  int64_t answer_tokens = 0;
  int64_t prefix_queried_tokens = 0, prefix_hit_tokens = 0;
  int64_t pages_evicted = 0, preemptions = 0;
  int64_t pages_offloaded = 0, pages_restored = 0, offload_failures = 0;  // page_cache.h: Counts
  int64_t drafted_tokens = 0, accepted_tokens = 0;
  int64_t media_encoded = 0, media_cache_hits = 0;
  int64_t steps = 0;
  int64_t rejected_full = 0;  // submit refused: the queue was full
  std::array<int64_t, 5> finished = {};  // by FinishReason

  // Histograms: seconds, or tokens
  Histogram queue_seconds, first_token_seconds, token_gap_seconds, request_seconds, prefill_seconds, decode_seconds;
  Histogram step_seconds, step_model_seconds;  // a whole step, and its call of the model
  Histogram media_seconds;                     // one picture or clip
  Histogram request_prompt_tokens, request_answer_tokens, step_tokens;

  EngineMetrics();
  double hit_rate() const {
    return prefix_queried_tokens > 0 ? static_cast<double>(prefix_hit_tokens) / prefix_queried_tokens : 0;
  }
};

}  // namespace m3
