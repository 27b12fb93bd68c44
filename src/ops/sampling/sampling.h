// The next token from one row of logits (serving.md §3.2). Host only: one row of V floats a token.
//
// Order: penalties, bias, mask, temperature, top_k, top_p, min_p, draw.
//   repetition  every id of prompt or answer: logit > 0 ? logit / r : logit · r
//   presence, frequency   ids of the answer: logit −= presence + frequency · count
//   top_k  the k largest (ties: lower id)     top_p  the shortest prefix, by falling probability, whose sum reaches p
//   min_p  drops what is below min_p times the largest probability
// Greedy (temperature 0) takes the largest after the mask, ties to the lower id. NaN counts as −infinity.
// The draw is a pure function of (seed, choice, position): neighbours in the batch, restarts and threads do not matter.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace m3 {

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  int top_k = 0;             // 0: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;
  std::vector<std::pair<int32_t, float>> logit_bias;
  uint64_t seed = 0;
};

struct SamplingState {
  std::span<const int32_t> prompt, answer;  // ids so far; read only if a penalty is set
  // Bit i of word i / 64: id i is allowed (grammar). Empty: all.
  std::span<const uint64_t> allowed;
  int32_t num_ids =
      0;  // ids from here on have no token and are never chosen (200061 in M3); 0: all have one
  uint64_t choice = 0;    // index among n answers of a request
  uint64_t position = 0;  // of the token to be drawn, in the sequence
};

// logits are changed in place. Throws if no id is allowed.
int32_t sample(std::span<float> logits_V, const SamplingParams& params, const SamplingState& state);

int32_t argmax(std::span<const float> logits_V);  // ties: lower id; NaN counts as −infinity

// Natural log-probabilities of the raw distribution: of `id`, and of the `num_top` likeliest ids in falling order.
struct TokenLogprobs {
  float chosen = 0;
  std::vector<std::pair<int32_t, float>> top;
};
TokenLogprobs token_logprobs(std::span<const float> logits_V, int32_t id, int num_top);

}  // namespace m3
