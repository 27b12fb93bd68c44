#include "engine/metrics.h"

#include <algorithm>

namespace m3 {

namespace {

// Bounds people's dashboards know (those of other engines), thinned out.
constexpr std::array kSeconds = {0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0};
constexpr std::array kStepSeconds = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0};
constexpr std::array kTokens = {1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6};

}  // namespace

void Histogram::add(double value) {
  ++counts_[std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin()];
  ++count_;
  sum_ += value;
}

EngineMetrics::EngineMetrics()
    : queue_seconds(kSeconds), first_token_seconds(kSeconds), token_gap_seconds(kStepSeconds), request_seconds(kSeconds),
      prefill_seconds(kSeconds), decode_seconds(kSeconds), step_seconds(kStepSeconds), step_model_seconds(kStepSeconds),
      media_seconds(kSeconds), request_prompt_tokens(kTokens), request_answer_tokens(kTokens), step_tokens(kTokens) {}

}  // namespace m3
