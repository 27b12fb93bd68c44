// Greedy answers are the same bytes whatever the engine does: on real (small) checkpoints, in f32 and bf16, with M3's
// blocks of 128 tokens. The fake model's tests (scheduling_test.cpp) cover the bookkeeping; here the operators count.
#include <unistd.h>

#include "engine/fake_engine_test.h"

namespace m3::test {
namespace {

constexpr const char* kFolder = M3_SOURCE_DIR "/tests/golden/models/tiny-text";  // selects 4 blocks of 128

const Checkpoint& checkpoint() {
  static const Checkpoint opened = Checkpoint::open(kFolder);
  return opened;
}
const Tokenizer& tokenizer() {
  static const Tokenizer loaded = Tokenizer::load(kFolder);
  return loaded;
}

struct Setup {
  DType dtype = DType::kF32;
  int64_t num_pages = 200, max_requests = 1;
  EngineOptions engine = {};
};

struct TextEngine {
  explicit TextEngine(const Setup& setup)
      : model(checkpoint(), options_of(setup)), engine_model(model, setup.num_pages), engine(engine_model, tokenizer(), setup.engine) {}
  static ModelOptions options_of(const Setup& setup) {
    ModelOptions options;
    options.decoder.dtype = setup.dtype;
    const int64_t rows = setup.max_requests * (1 + setup.engine.max_draft_tokens);
    options.step = {512, setup.max_requests, rows, 4096};
    return options;
  }
  std::vector<std::vector<int32_t>> answers(std::span<const GenerationRequest> requests) {
    std::vector<Result> results(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) engine.submit(requests[i], results[i].callback());
    while (engine.step()) engine.check_pages();
    std::vector<std::vector<int32_t>> answers;
    for (const Result& result : results) answers.push_back(result.tokens);
    return answers;
  }
  Model model;
  CpuEngineModel engine_model;
  Engine engine;
};

// Prompts that begin with a shared text of 128k + {0, 1, 64, 127} tokens.
std::vector<GenerationRequest> requests_with_shared_prefixes() {
  const std::vector<int32_t> shared = random_ids(11, 600);
  std::vector<GenerationRequest> requests;
  for (const int64_t k : {1, 3}) {
    for (const int64_t rest : {0, 1, 64, 127}) {
      GenerationRequest request = greedy({shared.begin(), shared.begin() + 128 * k + rest}, 8);
      for (const int32_t id : random_ids(static_cast<uint64_t>(100 * k + rest), 3)) request.prompt.push_back(id);
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

class Identity : public ::testing::TestWithParam<DType> {
 protected:
  // Each request alone, no prefix cache, in the largest chunks.
  std::vector<std::vector<int32_t>> alone(std::span<const GenerationRequest> requests) {
    TextEngine text({.dtype = GetParam(), .engine = {.prefix_cache = false}});
    return text.answers(requests);
  }
};

TEST_P(Identity, prefix_cache_batch_and_chunk_do_not_show) {
  const std::vector<GenerationRequest> requests = requests_with_shared_prefixes();
  const auto want = alone(requests);
  for (const int64_t chunk : {512, 17, 100}) {
    TextEngine text({.dtype = GetParam(), .engine = {.max_step_tokens = chunk}});
    EXPECT_EQ(text.answers(requests), want) << "prefix cache, chunks of " << chunk;
    EXPECT_GT(text.engine.metrics().prefix_hit_tokens, 1000);
    if (chunk == 512) {
      EXPECT_EQ(text.answers(requests), want) << "all known";
    }
  }
  for (const bool prefix_cache : {true, false}) {
    std::vector<GenerationRequest> many;
    std::vector<std::vector<int32_t>> want_many;
    for (size_t i = 0; i < 64; ++i) {
      many.push_back(requests[i % 8]);
      want_many.push_back(want[i % 8]);
    }
    TextEngine text({.dtype = GetParam(), .num_pages = 64 * 6, .max_requests = 64, .engine = {.prefix_cache = prefix_cache}});
    EXPECT_EQ(text.answers(many), want_many) << "64 together, prefix cache " << prefix_cache;
  }
}

TEST_P(Identity, eviction_and_preemption_do_not_show) {
  std::vector<GenerationRequest> requests = requests_with_shared_prefixes();
  for (size_t i = 0; i < requests.size(); ++i) requests[i].max_tokens = i < 4 ? 150 : 6;
  const auto want = alone(requests);
  TextEngine text({.dtype = GetParam(), .num_pages = 7, .max_requests = 8, .engine = {.max_step_tokens = 200}});
  EXPECT_EQ(text.answers(requests), want);
  EXPECT_GT(text.engine.metrics().preemptions, 0);
  EXPECT_GT(text.engine.metrics().pages_evicted, 0);
}

// cache-04, sched-07: each prompt is evicted to the file and comes back, with hits at 128k + 0, 1, 64, 127 tokens.
TEST_P(Identity, cache_04_offloading_does_not_show) {
  const std::vector<GenerationRequest> requests = requests_with_shared_prefixes();
  std::vector<GenerationRequest> other;  // each needs all pages but one
  for (uint64_t i = 0; i < requests.size(); ++i) other.push_back(greedy(random_ids(500 + i, 5 * 128 - 20), 4));
  const auto want = alone(requests), want_other = alone(other);
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("m3-identity-{}", ::getpid());
  {
    TextEngine text({.dtype = GetParam(), .num_pages = 6, .engine = {.offload_dir = folder}});
    for (int round = 0; round < 2; ++round) {
      for (size_t i = 0; i < requests.size(); ++i) {
        const int64_t restored = text.engine.metrics().pages_restored, hits = text.engine.metrics().prefix_hit_tokens;
        EXPECT_EQ(text.answers({&requests[i], 1}).front(), want[i]) << "request " << i << " of round " << round;
        EXPECT_EQ(text.answers({&other[i], 1}).front(), want_other[i]) << "other " << i << " of round " << round;
        if (round == 0) continue;
        EXPECT_GT(text.engine.metrics().pages_restored, restored + 4) << i;
        EXPECT_EQ(text.engine.metrics().prefix_hit_tokens - hits, std::ssize(requests[i].prompt) + std::ssize(other[i].prompt) - 2);
      }
    }
    EXPECT_EQ(text.engine.metrics().offload_failures, 0);
  }
  std::filesystem::remove_all(folder);
}

// cache-03: computed by one engine, answered by another, from prompts of nine blocks of which four are selected (M3: 2,048
// tokens and more).
TEST_P(Identity, cache_03_moving_to_another_engine_does_not_show) {
  const std::vector<int32_t> text = random_ids(21, 1160);
  std::vector<GenerationRequest> requests;
  for (const int64_t length : {1024, 1025, 1088, 1151, 1160}) {  // 128k + 0, 1, 64, 127, and all
    requests.push_back(greedy({text.begin(), text.begin() + length}, 8));
    if (length < 1160) requests.back().prompt.push_back(7);
  }
  const auto want = alone(requests);
  const auto file = std::filesystem::temp_directory_path() / fmt::format("m3-identity-{}", ::getpid());
  {
    TextEngine first({.dtype = GetParam(), .engine = {.cache_file = file}});
    first.answers({&requests.back(), 1});
    first.engine.save_cache();
  }
  TextEngine second({.dtype = GetParam(), .engine = {.cache_file = file}});
  std::filesystem::remove(file);
  EXPECT_EQ(second.answers(requests), want);
  EXPECT_EQ(second.engine.metrics().computed_prompt_tokens, 5) << "the last token of each";
}

TEST_P(Identity, speculation_does_not_show) {
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 4; ++i) {
    // Two distinct tokens in turn: what followed the last time is likely to follow again.
    GenerationRequest request = greedy({}, 80);
    for (int64_t t = 0; t < 300; ++t) request.prompt.push_back(static_cast<int32_t>(200 + i + t % 3));
    if (i >= 2) request.sampling = {.temperature = 0.7f, .top_k = 2, .seed = i};
    requests.push_back(std::move(request));
  }
  const auto want = alone(requests);
  TextEngine text({.dtype = GetParam(), .max_requests = 4, .engine = {.max_draft_tokens = 17}});
  EXPECT_EQ(text.answers(requests), want);
  EXPECT_GT(text.engine.metrics().accepted_tokens, 10);
  EXPECT_LT(text.engine.metrics().accepted_tokens, text.engine.metrics().drafted_tokens) << "rejections were tried too";
}

INSTANTIATE_TEST_SUITE_P(Types, Identity, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace m3::test
