// An engine on the fake model, and what its answers must be.
#pragma once
#include <gtest/gtest.h>

#include "base/rng.h"
#include "engine/engine.h"
#include "engine/fake_engine_model.h"

namespace m3::test {

inline const Checkpoint& tiny_checkpoint() {
  static const Checkpoint opened = Checkpoint::open(M3_SOURCE_DIR "/tests/golden/models/tiny-vl");
  return opened;
}
inline const Tokenizer& tiny_tokenizer() {
  static const Tokenizer loaded = Tokenizer::load(M3_SOURCE_DIR "/tests/golden/models/tiny-vl");
  return loaded;
}

struct FakeOptions {
  int64_t num_pages = 64;
  int page_tokens = 16;
  int64_t max_sequences = 8, max_step_tokens = 128, max_sequence_tokens = 4096;
  int memory = 0;
  EngineOptions engine = {};
};

struct FakeEngine {
  explicit FakeEngine(const FakeOptions& o = {})
      : model(tiny_checkpoint().config(),
              {o.num_pages, o.page_tokens, 1024, o.max_step_tokens, o.max_sequences,
               o.max_sequences * (1 + o.engine.max_draft_tokens), o.max_sequence_tokens},
              o.memory),
        engine(model, tiny_tokenizer(), o.engine) {}
  // Steps until all requests have ended; pages are checked after each.
  void run() {
    while (engine.step()) engine.check_pages();
    EXPECT_EQ(engine.num_requests(), 0);
    EXPECT_EQ(engine.pages().num_available(), engine.pages().num_pages());
  }
  FakeEngineModel model;
  Engine engine;
};

struct Result {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;
  std::string text;
  std::vector<int64_t> prefill;
  int num_finished = 0;
  GenerationEvent last;

  GenerationCallback callback() {
    return [this](const GenerationEvent& event) {
      EXPECT_EQ(num_finished, 0) << "nothing comes behind the last event";
      if (event.kind == GenerationEvent::Kind::kPrefill) prefill.push_back(event.prompt_done);
      if (event.kind == GenerationEvent::Kind::kToken) {
        tokens.push_back(event.token);
        if (event.logprobs) logprobs.push_back(*event.logprobs);
      }
      text += event.text;
      if (event.kind == GenerationEvent::Kind::kFinish) {
        ++num_finished;
        last = event;
      }
    };
  }
};

// Ordinary tokens: no placeholders among them.
inline std::vector<int32_t> random_ids(uint64_t seed, int64_t count) {
  Philox rng(seed, 9);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(900));
  return ids;
}

inline GenerationRequest greedy(std::vector<int32_t> prompt, int64_t max_tokens) {
  GenerationRequest request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  return request;
}

// The answer, from the model's definition alone. `media` replaces placeholders by their rows, in order.
inline std::vector<int32_t> expected_answer(const FakeEngineModel& model, const GenerationRequest& request, int64_t count,
                                            std::vector<uint64_t> media = {}) {
  std::vector<uint64_t> inputs(request.prompt.begin(), request.prompt.end());
  size_t next = 0;
  for (uint64_t& input : inputs) {
    if (!media.empty() && input == static_cast<uint64_t>(model.config().image_token_id)) input = media.at(next++);
  }
  std::vector<int32_t> answer;
  while (static_cast<int64_t>(answer.size()) < count) {
    std::vector<float> logits = model.logits_after(inputs);
    SamplingState state;
    state.prompt = request.prompt;
    state.answer = answer;
    state.num_ids = tiny_tokenizer().size();
    state.choice = request.choice;
    state.position = inputs.size();
    answer.push_back(sample(logits, request.sampling, state));
    inputs.push_back(static_cast<uint64_t>(answer.back()));
  }
  return answer;
}

}  // namespace m3::test
