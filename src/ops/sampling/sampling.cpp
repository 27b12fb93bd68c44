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
  for (size_t begin = 0; !state.allowed.empty() && begin < logits.size(); begin += 64) {
    const uint64_t word = begin / 64 < state.allowed.size() ? state.allowed[begin / 64] : 0;
    if (word == ~uint64_t{0}) continue;
    for (size_t i = begin; i < std::min(begin + 64, logits.size()); ++i) {
      if ((word >> (i - begin) & 1) == 0) logits[i] = kNever;
    }
  }
  // Written without a branch, so that it is a few vector instructions.
  for (float& logit : logits) logit = logit == logit ? logit : kNever;
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

// The k first of all candidates, in order. With a heap of k, most of V logits cost one comparison.
std::vector<Candidate> first_candidates(std::span<const float> logits, size_t k) {
  std::vector<Candidate> heap;  // the last of them on top
  heap.reserve(k);
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] == kNever) continue;
    // Ids ascend: of equals, those already there come first.
    if (heap.size() == k && !(logits[i] > heap.front().logit)) continue;
    if (heap.size() == k) {
      std::pop_heap(heap.begin(), heap.end(), before);
      heap.pop_back();
    }
    heap.push_back({static_cast<int32_t>(i), logits[i], 0});
    std::push_heap(heap.begin(), heap.end(), before);
  }
  std::sort_heap(heap.begin(), heap.end(), before);
  return heap;
}

std::vector<Candidate> all_candidates(std::span<const float> logits) {
  std::vector<Candidate> list;
  list.reserve(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != kNever) list.push_back({static_cast<int32_t>(i), logits[i], 0});
  }
  return list;
}

// How many of the `num_sorted` first top_p and min_p keep; all of them: perhaps more behind them.
size_t count_kept(const std::vector<Candidate>& list, size_t num_sorted, const SamplingParams& params, double sum) {
  double reached = 0;
  size_t keep = 0;
  while (keep < num_sorted && list[keep].probability >= params.min_p &&
         (keep == 0 || params.top_p >= 1.0f || reached < params.top_p * sum)) {
    reached += list[keep++].probability;
  }
  return keep;
}

// The candidates that temperature, top_k, top_p and min_p leave; in falling order where one of the last three is set.
std::vector<Candidate> truncate(std::span<const float> logits, const SamplingParams& params) {
  const bool top_k = params.top_k > 0 && static_cast<size_t>(params.top_k) < logits.size();
  std::vector<Candidate> list = top_k ? first_candidates(logits, params.top_k) : all_candidates(logits);
  if (list.empty()) return list;
  const float highest = std::min_element(list.begin(), list.end(), before)->logit;
  double sum = 0;
  for (Candidate& c : list) {
    // Equal logits (two infinities too) are equally likely.
    const double gap = c.logit == highest ? 0 : (double{c.logit} - highest) / params.temperature;
    sum += c.probability = std::exp(gap);
  }
  if (params.top_p >= 1.0f && params.min_p <= 0.0f) return list;
  // Few candidates hold most of the probability: sort only as many as it takes. The first has probability 1.
  for (size_t wanted = 32, sorted = 0;; wanted *= 8) {
    const size_t end = std::min(wanted, list.size());
    if (!top_k) {
      std::nth_element(list.begin() + sorted, list.begin() + end - 1, list.end(), before);
      std::sort(list.begin() + sorted, list.begin() + end, before);
    }
    sorted = end;
    const size_t keep = count_kept(list, sorted, params, sum);
    if (keep == sorted && sorted < list.size()) continue;
    list.resize(std::max<size_t>(keep, 1));
    return list;
  }
}

}  // namespace

int32_t argmax(std::span<const float> logits_V) {
  M3_CHECK(!logits_V.empty(), "no logits");
  // Lanes that do not depend on each other become vector maxima; NaN is never larger.
  constexpr size_t kLanes = 16;
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, kNever);
  const size_t whole = logits_V.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] = logits_V[i + j] > lanes[j] ? logits_V[i + j] : lanes[j];
  }
  float highest = *std::max_element(lanes, lanes + kLanes);
  for (size_t i = whole; i < logits_V.size(); ++i) highest = logits_V[i] > highest ? logits_V[i] : highest;
  const auto first = std::find(logits_V.begin(), logits_V.end(), highest);
  return static_cast<int32_t>(first == logits_V.end() ? 0 : first - logits_V.begin());  // all NaN: as all are equal
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
