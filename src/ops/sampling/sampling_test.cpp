#include "ops/sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/check.h"
#include "base/rng.h"

namespace m3 {
namespace {

using Logits = std::vector<float>;

int32_t draw(Logits logits, const SamplingParams& params, const SamplingState& state = {}) {
  return sample(logits, params, state);
}

// How often each id comes in n draws at different positions.
std::vector<int> counts(const Logits& logits, const SamplingParams& params, int n = 4000) {
  std::vector<int> result(logits.size());
  for (int i = 0; i < n; ++i) {
    SamplingState state;
    state.position = i;
    ++result[draw(logits, params, state)];
  }
  return result;
}

TEST(Sampling, greedy_takes_the_largest_and_ties_go_to_the_lower_id) {
  EXPECT_EQ(draw({1, 3, 2, 3}, {.temperature = 0}), 1);
  EXPECT_EQ(draw({NAN, -5, NAN, -4}, {.temperature = 0}), 3);
  EXPECT_EQ(argmax(Logits{NAN, NAN, -INFINITY}), 2);
}

TEST(Sampling, draws_follow_the_softmax) {
  const Logits logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  const std::vector<int> n = counts(logits, {});
  // Three standard deviations of 4000 draws: 95.
  EXPECT_NEAR(n[0], 2000, 95);
  EXPECT_NEAR(n[1], 1200, 95);
  EXPECT_NEAR(n[2], 800, 95);
  const std::vector<int> sharp = counts(logits, {.temperature = 0.5f});  // squares: 25 : 9 : 4
  EXPECT_NEAR(sharp[0], 4000 * 25 / 38, 95);
  EXPECT_NEAR(sharp[2], 4000 * 4 / 38, 95);
}

TEST(Sampling, top_k_top_p_and_min_p_cut_the_tail) {
  const Logits logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  const auto survivors = [&](SamplingParams params) {
    std::string ids;
    const std::vector<int> n = counts(logits, params);
    for (size_t i = 0; i < n.size(); ++i) {
      if (n[i] > 0) ids += static_cast<char>('0' + i);
    }
    return ids;
  };
  EXPECT_EQ(survivors({}), "0123");
  EXPECT_EQ(survivors({.top_k = 2}), "13");
  EXPECT_EQ(survivors({.top_k = 1}), "1");
  EXPECT_EQ(survivors({.top_k = 9}), "0123");
  EXPECT_EQ(survivors({.top_p = 0.35f}), "1");  // the first alone reaches it
  EXPECT_EQ(survivors({.top_p = 0.65f}), "13");
  EXPECT_EQ(survivors({.top_p = 0.75f}), "123");
  EXPECT_EQ(survivors({.top_p = 0.0f}), "1");
  EXPECT_EQ(survivors({.min_p = 0.6f}), "13");  // 0.3 >= 0.6 * 0.4, 0.2 is not
  EXPECT_EQ(survivors({.min_p = 1.0f}), "1");
  // top_k first: of 0.4 and 0.3 the first holds 0.57 of what is left.
  EXPECT_EQ(survivors({.top_k = 2, .top_p = 0.5f}), "1");
}

// What is kept, by sorting everything: the definition in sampling.h.
std::vector<int32_t> kept_by_sorting(const Logits& logits, const SamplingParams& params) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (params.top_k > 0) ids.resize(std::min<size_t>(ids.size(), params.top_k));
  const auto probability = [&](int32_t id) { return std::exp((double{logits[id]} - logits[ids[0]]) / params.temperature); };
  double sum = 0, reached = 0;
  for (const int32_t id : ids) sum += probability(id);
  size_t keep = 0;
  while (keep < ids.size() && (keep == 0 || reached < params.top_p * sum)) reached += probability(ids[keep++]);
  while (probability(ids[keep - 1]) < params.min_p) --keep;
  ids.resize(keep);
  return ids;
}

TEST(Sampling, large_vocabularies_keep_what_sorting_all_would_keep) {
  Philox rng(3);
  Logits logits(3000);
  for (const double spread : {0.3, 3.0}) {
    for (float& x : logits) x = static_cast<float>(rng.normal() * spread);
    for (int i = 0; i < 50; ++i) logits[rng.below(3000)] = logits[0];  // ties
    for (const SamplingParams& params : {SamplingParams{.top_p = 0.9f}, SamplingParams{.top_p = 0.1f}, SamplingParams{.top_k = 700, .top_p = 0.95f},
                                         SamplingParams{.min_p = 0.1f}, SamplingParams{.top_p = 0.8f, .min_p = 0.01f}, SamplingParams{.top_k = 40}}) {
      const std::vector<int32_t> kept = kept_by_sorting(logits, params);
      std::set<int32_t> drawn;
      for (uint64_t position = 0; position < 120; ++position) {
        SamplingState state;
        state.position = position;
        drawn.insert(draw(logits, params, state));
      }
      const std::set<int32_t> allowed(kept.begin(), kept.end());
      EXPECT_TRUE(std::includes(allowed.begin(), allowed.end(), drawn.begin(), drawn.end())) << kept.size();
      EXPECT_GT(drawn.size(), std::min<size_t>(kept.size(), 40) / 2);
    }
  }
}

TEST(Sampling, top_k_ties_go_to_the_lower_ids) {
  const std::vector<int> n = counts({1, 1, 1, 1}, {.top_k = 2}, 200);
  EXPECT_GT(n[0], 0);
  EXPECT_GT(n[1], 0);
  EXPECT_EQ(n[2] + n[3], 0);
}

TEST(Sampling, the_draw_depends_on_seed_choice_and_position_only) {
  const Logits logits(50, 0.0f);
  const auto series = [&](uint64_t seed, uint64_t choice) {
    std::vector<int32_t> ids;
    for (uint64_t p = 0; p < 20; ++p) {
      SamplingState state;
      state.choice = choice;
      state.position = p;
      ids.push_back(draw(logits, {.seed = seed}, state));
    }
    return ids;
  };
  EXPECT_EQ(series(7, 0), series(7, 0));
  EXPECT_NE(series(7, 0), series(8, 0));
  EXPECT_NE(series(7, 0), series(7, 1));
}

TEST(Sampling, penalties_change_the_logits_as_documented) {
  Logits logits = {2, -2, 2, 2, 2};
  const std::vector<int32_t> prompt = {0, 1, 99}, answer = {2, 2, 3};
  SamplingState state;
  state.prompt = prompt;
  state.answer = answer;
  sample(logits,
         {.temperature = 0,
          .repetition_penalty = 2,
          .presence_penalty = 0.25f,
          .frequency_penalty = 0.5f},
         state);
  EXPECT_EQ(logits, (Logits{1, -4, 1 - 0.25f - 1.0f, 1 - 0.25f - 0.5f, 2}));
}

TEST(Sampling, bias_mask_and_ids_without_a_token) {
  EXPECT_EQ(draw({0, 1, 2}, {.temperature = 0, .logit_bias = {{0, 5.0f}, {77, 100.0f}}}), 0);
  SamplingState state;
  state.num_ids = 2;
  EXPECT_EQ(draw({0, 1, 2}, {.temperature = 0, .logit_bias = {{2, 100.0f}}}, state), 1);
  const uint64_t only_0[] = {1};
  state.allowed = only_0;
  EXPECT_EQ(draw({0, 1, 2}, {.temperature = 0}, state), 0);
  EXPECT_EQ(draw({0, 1, 2}, {}, state), 0);
  const uint64_t none[] = {0};
  state.allowed = none;
  EXPECT_THROW(draw({0, 1, 2}, {.temperature = 0}, state), Error);
  EXPECT_THROW(draw({0, 1, 2}, {}, state), Error);
}

TEST(Sampling, log_probabilities_are_of_the_raw_distribution) {
  const Logits logits = {std::log(1.0f), std::log(5.0f), NAN, std::log(4.0f)};
  const TokenLogprobs result = token_logprobs(logits, 0, 2);
  EXPECT_NEAR(result.chosen, std::log(0.1), 1e-6);
  ASSERT_EQ(result.top.size(), 2u);
  EXPECT_EQ(result.top[0].first, 1);
  EXPECT_NEAR(result.top[0].second, std::log(0.5), 1e-6);
  EXPECT_EQ(result.top[1].first, 3);
  EXPECT_EQ(token_logprobs(logits, 2, 0).chosen, -INFINITY);
}

}  // namespace
}  // namespace m3
