#include "ops/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "base/check.h"
#include "base/rng.h"

namespace m3 {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void apply_penalties(std::span<float> logits, const SamplingParams& params,
                     const SamplingState& state) {
  const bool repetition = params.repetition_penalty != 1.0f;
  if (!repetition && params.presence_penalty == 0.0f && params.frequency_penalty == 0.0f) return;
  const auto known = [&](int32_t id) { return id >= 0 && static_cast<size_t>(id) < logits.size(); };
  std::unordered_map<int32_t, int> answer_counts;
  for (int32_t id : state.answer) ++answer_counts[id];
  if (repetition) {
    std::unordered_map<int32_t, int> seen = answer_counts;
    for (int32_t id : state.prompt) ++seen[id];
    for (const auto& [id, count] : seen) {
      if (!known(id)) continue;
      float& logit = logits[id];
      logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    }
  }
  for (const auto& [id, count] : answer_counts) {
    if (known(id))
      logits[id] -= params.presence_penalty + params.frequency_penalty * static_cast<float>(count);
  }
}

void apply_bias_and_mask(std::span<float> logits, const SamplingParams& params,
                         const SamplingState& state) {
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= 0 && static_cast<size_t>(id) < logits.size()) logits[id] += bias;
  }
  for (size_t i = state.num_ids > 0 ? state.num_ids : logits.size(); i < logits.size(); ++i)
    logits[i] = kNever;
  if (!state.allowed.empty()) {
    for (size_t i = 0; i < logits.size(); ++i) {
      const bool allowed =
          i / 64 < state.allowed.size() && (state.allowed[i / 64] >> (i % 64) & 1) != 0;
      if (!allowed) logits[i] = kNever;
    }
  }
  for (float& logit : logits) {
    if (std::isnan(logit)) logit = kNever;
  }
}

struct Candidate {
  int32_t id;
  float logit;
  double probability;  // relative to the largest, until the sum is known
};

// By falling logit, ties to the lower id.
bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The candidates that temperature, top_k, top_p and min_p leave, in falling order.
std::vector<Candidate> truncate(std::span<const float> logits, const SamplingParams& params) {
  std::vector<Candidate> list;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != kNever) list.push_back({static_cast<int32_t>(i), logits[i], 0});
  }
  if (list.empty()) return list;
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < list.size()) {
    std::nth_element(list.begin(), list.begin() + params.top_k - 1, list.end(), before);
    list.resize(params.top_k);
  }
  std::sort(list.begin(), list.end(), before);
  double sum = 0;
  for (Candidate& c : list) {
    // Equal logits (two infinities too) are equally likely.
    const double gap =
        c.logit == list[0].logit ? 0 : (double{c.logit} - list[0].logit) / params.temperature;
    sum += c.probability = std::exp(gap);
  }
  if (params.top_p < 1.0f) {
    double reached = 0;
    size_t keep = 0;
    while (keep < list.size() && (keep == 0 || reached < params.top_p * sum))
      reached += list[keep++].probability;
    list.resize(keep);
  }
  // The largest has relative probability 1.
  while (list.back().probability < params.min_p) list.pop_back();
  return list;
}

}  // namespace

int32_t argmax(std::span<const float> logits_V) {
  M3_CHECK(!logits_V.empty(), "no logits");
  size_t best = 0;
  for (size_t i = 1; i < logits_V.size(); ++i) {
    if (logits_V[i] > logits_V[best] || (std::isnan(logits_V[best]) && !std::isnan(logits_V[i])))
      best = i;
  }
  return static_cast<int32_t>(best);
}

int32_t sample(std::span<float> logits_V, const SamplingParams& params,
               const SamplingState& state) {
  apply_penalties(logits_V, params, state);
  apply_bias_and_mask(logits_V, params, state);
  if (params.temperature == 0.0f) {
    const int32_t id = argmax(logits_V);
    M3_CHECK(logits_V[id] != kNever,
             "no token is allowed: mask, bias and penalties leave nothing of {} ids",
             logits_V.size());
    return id;
  }
  const std::vector<Candidate> list = truncate(logits_V, params);
  M3_CHECK(!list.empty(), "no token is allowed: mask, bias and penalties leave nothing of {} ids",
           logits_V.size());
  double sum = 0;
  for (const Candidate& c : list) sum += c.probability;
  double left = Philox(params.seed, state.choice, state.position * 2).uniform() * sum;
  for (const Candidate& c : list) {
    left -= c.probability;
    if (left < 0) return c.id;
  }
  return list.back().id;  // rounding left a crumb
}

TokenLogprobs token_logprobs(std::span<const float> logits_V, int32_t id, int num_top) {
  M3_CHECK(id >= 0 && static_cast<size_t>(id) < logits_V.size(), "id {} is outside {} logits", id,
           logits_V.size());
  const float highest = logits_V[argmax(logits_V)];
  double sum = 0;
  std::vector<Candidate> list;
  list.reserve(logits_V.size());
  for (size_t i = 0; i < logits_V.size(); ++i) {
    const float logit = std::isnan(logits_V[i]) ? kNever : logits_V[i];
    sum += std::exp(double{logit} - highest);
    list.push_back({static_cast<int32_t>(i), logit, 0});
  }
  const double log_sum = highest + std::log(sum);
  TokenLogprobs result;
  result.chosen = static_cast<float>(list[id].logit - log_sum);
  const size_t count = std::min<size_t>(std::max(num_top, 0), list.size());
  std::partial_sort(list.begin(), list.begin() + count, list.end(), before);
  for (size_t i = 0; i < count; ++i) {
    result.top.emplace_back(list[i].id, static_cast<float>(list[i].logit - log_sum));
  }
  return result;
}

}  // namespace m3
