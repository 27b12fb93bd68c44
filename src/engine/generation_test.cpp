// Whole requests through the engine, on the small golden models.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"
#include "engine/engine.h"
#include "model/sequence_runner.h"

namespace m3 {
namespace {

constexpr const char* kFolder = M3_SOURCE_DIR "/tests/golden/models/tiny-vl";  // blocks of 16 tokens

const Checkpoint& checkpoint() {
  static const Checkpoint opened = Checkpoint::open(kFolder);
  return opened;
}
const Tokenizer& tokenizer() {
  static const Tokenizer loaded = Tokenizer::load(kFolder);
  return loaded;
}

Model make_model(int64_t max_requests) {
  ModelOptions options;
  options.decoder.dtype = DType::kF32;
  options.step = {256, max_requests, max_requests, 512};
  options.max_vision_patches = 64;
  return Model(checkpoint(), options);
}

struct TestOptions {
  int64_t cache_tokens = 256, max_step_tokens = 64;
  EngineOptions engine = {};
};

struct OwnModel {
  OwnModel(int64_t max_requests, const TestOptions& options)
      : model(make_model(max_requests)), engine_model(model, (options.cache_tokens + 15) / 16) {}
  Model model;
  CpuEngineModel engine_model;
};

class TestEngine : private OwnModel, public Engine {
 public:
  TestEngine(int64_t max_requests, TestOptions options)
      : OwnModel(max_requests, options), Engine(engine_model, tokenizer(), with_chunk(options)) {}

 private:
  static EngineOptions with_chunk(TestOptions options) {
    options.engine.max_step_tokens = options.max_step_tokens;
    return options.engine;
  }
};

GenerationRequest request(uint64_t seed, int64_t prompt_tokens, int64_t max_tokens) {
  Philox rng(seed);
  GenerationRequest request;
  for (int64_t i = 0; i < prompt_tokens; ++i) request.prompt.push_back(static_cast<int32_t>(rng.below(1000)));
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  return request;
}

struct Result {
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<int64_t> prefill;
  std::optional<FinishReason> reason;
  GenerationTimings timings;

  GenerationCallback callback() {
    return [this](const GenerationEvent& event) {
      if (event.kind == GenerationEvent::Kind::kPrefill) prefill.push_back(event.prompt_done);
      if (event.kind == GenerationEvent::Kind::kToken) tokens.push_back(event.token);
      if (event.kind == GenerationEvent::Kind::kFinish) {
        reason = event.reason;
        timings = event.timings;
      }
      text += event.text;
    };
  }
};

Result run_alone(GenerationRequest request, TestOptions options) {
  TestEngine engine(1, options);
  Result result;
  engine.submit(std::move(request), result.callback());
  while (engine.step()) {
  }
  EXPECT_EQ(engine.pages().num_available(), engine.pages().num_pages()) << "a finished request gives its pages back";
  return result;
}

TEST(Engine, greedy_answers_equal_the_model_fed_by_hand_for_any_chunk) {
  Model model = make_model(1);
  SequenceRunner sequence(model, 256);
  GenerationRequest wanted = request(1, 100, 12);
  std::vector<int32_t> want;
  Tensor logits = sequence.feed(wanted.prompt);
  for (int i = 0; i < 12; ++i) {
    want.push_back(argmax({logits.ptr<float>(), static_cast<size_t>(tokenizer().size())}));
    logits = sequence.feed(std::span(&want.back(), 1));
  }
  for (const int64_t chunk : {7, 16, 99, 100, 256}) {
    const Result got = run_alone(wanted, {.cache_tokens = 256, .max_step_tokens = chunk});
    EXPECT_EQ(got.tokens, want) << "chunk " << chunk;
    EXPECT_EQ(got.reason, FinishReason::kLength);
    EXPECT_EQ(static_cast<int64_t>(got.prefill.size()), (100 + chunk - 1) / chunk);
    EXPECT_EQ(got.prefill.back(), 100);
    EXPECT_EQ(got.timings.prompt_tokens, 100);
    EXPECT_EQ(got.timings.answer_tokens, 12);
    EXPECT_EQ(got.text, tokenizer().decode(want, true));
  }
}

TEST(Engine, requests_that_run_together_get_the_answers_they_get_alone) {
  const TestOptions options = {.cache_tokens = 400, .max_step_tokens = 40};
  std::vector<GenerationRequest> requests = {request(2, 90, 10), request(3, 3, 30), request(4, 61, 5), request(5, 120, 8)};
  requests[1].sampling.temperature = 1.0f;
  requests[1].sampling.seed = 11;
  std::vector<Result> alone;
  for (const GenerationRequest& request : requests) alone.push_back(run_alone(request, options));

  TestEngine engine(3, options);  // the fourth waits for a place
  std::vector<Result> together(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) engine.submit(requests[i], together[i].callback());
  while (engine.step()) {
  }
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(together[i].tokens, alone[i].tokens) << i;
  EXPECT_EQ(engine.num_requests(), 0);
  EXPECT_EQ(engine.pages().num_available(), engine.pages().num_pages());
}

TEST(Engine, an_answer_ends_at_a_stop_id_and_at_a_stop_string) {
  const TestOptions options = {.cache_tokens = 256, .max_step_tokens = 64};
  const Result whole = run_alone(request(6, 20, 16), options);
  ASSERT_EQ(whole.tokens.size(), 16u);

  GenerationRequest by_id = request(6, 20, 16);
  by_id.stop_ids = {whole.tokens[5]};
  const Result cut = run_alone(by_id, options);
  const auto first = std::find(whole.tokens.begin(), whole.tokens.end(), whole.tokens[5]);
  EXPECT_EQ(cut.tokens, std::vector<int32_t>(whole.tokens.begin(), first + 1));
  EXPECT_EQ(cut.reason, FinishReason::kStop);

  GenerationRequest by_string = request(6, 20, 16);
  const size_t at = whole.text.size() / 2;
  by_string.stop = {whole.text.substr(at, 3)};
  const Result stopped = run_alone(by_string, options);
  EXPECT_EQ(stopped.text, whole.text.substr(0, whole.text.find(by_string.stop[0])));
  EXPECT_EQ(stopped.reason, FinishReason::kStop);
  EXPECT_LT(stopped.tokens.size(), 16u);
}

TEST(Engine, cancelling_ends_a_request_with_what_it_has) {
  TestEngine engine(1, {.cache_tokens = 256, .max_step_tokens = 16});
  Result running, waiting;
  const RequestId first = engine.submit(request(7, 40, 100), running.callback());
  const RequestId second = engine.submit(request(8, 40, 100), waiting.callback());
  for (int i = 0; i < 5; ++i) engine.step();
  engine.cancel(first);
  engine.cancel(second);
  EXPECT_FALSE(engine.step());
  EXPECT_EQ(running.reason, FinishReason::kCancelled);
  EXPECT_EQ(running.tokens.size(), 3u) << "two steps of prompt only, one with the first token, two more";
  EXPECT_EQ(waiting.reason, FinishReason::kCancelled);
  EXPECT_TRUE(waiting.tokens.empty());
  EXPECT_EQ(engine.pages().num_available(), engine.pages().num_pages());
  engine.cancel(99);  // unknown: ignored
}

TEST(Engine, an_answer_is_cut_to_what_the_cache_holds) {
  const Result result = run_alone(request(9, 60, 1000), {.cache_tokens = 64, .max_step_tokens = 64});
  EXPECT_EQ(result.tokens.size(), 4u);
  EXPECT_EQ(result.reason, FinishReason::kLength);
}

TEST(Engine, requests_that_can_never_run_are_refused_by_name) {
  TestEngine engine(1, {.cache_tokens = 64, .max_step_tokens = 64});
  auto message = [&](GenerationRequest request) {
    try {
      engine.submit(std::move(request), {});
      return std::string("accepted");
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(message(request(1, 0, 5)), "the prompt is empty");
  EXPECT_EQ(message(request(1, 5, 0)), "max_tokens is 0, want at least 1");
  EXPECT_EQ(message(request(1, 64, 5)),
            "the prompt has 64 tokens and the answer needs at least one, the context holds 64");
  GenerationRequest outside = request(1, 5, 5);
  outside.prompt[2] = 1088;
  EXPECT_EQ(message(outside), "prompt id 1088 is outside the vocabulary of 1088");
  GenerationRequest media = request(1, 5, 5);
  media.media.push_back({false, {1, 2, 2}, std::make_shared<const std::vector<float>>(4 * 1176, 0.0f)});
  EXPECT_EQ(message(media), "the prompt has 0 image placeholder tokens, its media give 1 rows");
  EXPECT_EQ(engine.num_requests(), 0);
}

TEST(Engine, pictures_of_one_request_do_not_reach_another) {
  const TestOptions options = {.cache_tokens = 256, .max_step_tokens = 24};
  auto with_picture = [&](float value) {
    GenerationRequest r = request(10, 40, 8);
    for (int i = 10; i < 14; ++i) r.prompt[i] = checkpoint().config().image_token_id;
    std::vector<float> patches(16 * 1176);
    Philox rng(static_cast<uint64_t>(value * 100));
    for (float& x : patches) x = static_cast<float>(rng.normal()) * value;
    r.media.push_back({false, {1, 4, 4}, std::make_shared<const std::vector<float>>(std::move(patches))});
    return r;
  };
  const Result a = run_alone(with_picture(1.0f), options), b = run_alone(with_picture(2.0f), options);
  EXPECT_NE(a.tokens, b.tokens);
  TestEngine engine(2, options);
  Result first, second;
  engine.submit(with_picture(1.0f), first.callback());
  engine.submit(with_picture(2.0f), second.callback());
  while (engine.step()) {
  }
  EXPECT_EQ(first.tokens, a.tokens);
  EXPECT_EQ(second.tokens, b.tokens);
}

}  // namespace
}  // namespace m3
