// Memory planned and promised, and what a page is made of.
#include "engine/session.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/rng.h"
#include "engine/fake_engine_test.h"
#include "model/kv_lanes.h"

namespace m3::test {
namespace {

SessionOptions options_of(int64_t context_tokens) {
  SessionOptions options;
  options.context_tokens = context_tokens;
  options.progress = Progress::Mode::kOff;
  return options;
}

TEST(Session, sched_06_too_little_memory_names_what_would_fit) {
  try {
    SessionOptions options = options_of(int64_t{1} << 40);
    options.longest_sequence = 1024;
    const Session session(tiny_checkpoint(), tiny_tokenizer(), options);
    FAIL() << "a tera token fits";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("of memory are free"), std::string::npos) << message;
    EXPECT_NE(message.find("tokens of context fit (asked for 1099511627776)"), std::string::npos) << message;
  }
}

TEST(Session, says_how_many_requests_run_together) {
  SessionOptions options = options_of(1024);
  options.dtype = DType::kF32;
  options.max_requests = 8;
  Session session(tiny_checkpoint(), tiny_tokenizer(), options);
  EXPECT_NE(session.capacity().find("64 pages of 16 = 1024 tokens; together 1 x 1024 | 4 x 256 | 8 x 64 tokens"), std::string::npos)
      << session.capacity();
}

TEST(Session, features_of_known_media_are_planned_to_the_byte) {
  SessionOptions options = options_of(1024);
  options.max_vision_patches = options.total_patches = 64;
  Session session(tiny_checkpoint(), tiny_tokenizer(), options);
  const ModelConfig& config = tiny_checkpoint().config();
  const int64_t want = 64 / 4 * config.text.hidden_size * dtype_bytes(session.model().activation_dtype());
  int64_t planned = -1;
  for (const auto& entry : session.plan().entries()) {
    if (entry.name == "media features") planned = entry.bytes;
  }
  EXPECT_EQ(planned, want);
}

// cache-05, cache-06: every lane is described, with its type and strides, and the description is complete.
TEST(KvLanes, cache_05_06_a_page_copied_lane_by_lane_is_the_page) {
  const TextConfig& config = tiny_checkpoint().config().text;
  KvCache cache(config, 3, DType::kBF16);
  const std::vector<KvLane> lanes = kv_lanes(cache, config.num_layers);
  ASSERT_EQ(lanes.size(), static_cast<size_t>(2 * config.num_layers + config.num_sparse_layers()));
  int64_t bytes = 0;
  Philox rng(1);
  for (const KvLane& lane : lanes) {
    const bool index = lane.kind == KvLane::Kind::kIndexKeys;
    EXPECT_EQ(lane.page_shape, index ? Shape({config.block_size, config.index_dim})
                                     : Shape({config.num_kv_heads, config.block_size, config.head_dim}));
    EXPECT_EQ(lane.dtype, DType::kBF16);
    bytes += lane.page_stride_bytes;
    auto* page = static_cast<uint8_t*>(lane.first_page) + lane.page_stride_bytes;
    for (int64_t i = 0; i < lane.page_stride_bytes; ++i) page[i] = static_cast<uint8_t>(rng.below(256));
  }
  EXPECT_EQ(bytes, cache.page_bytes());
  cache.copy_page(1, 2);
  for (const KvLane& lane : lanes) {  // cache-02: copy_page moves all of them
    const auto* pages = static_cast<const uint8_t*>(lane.first_page);
    EXPECT_EQ(0, std::memcmp(pages + lane.page_stride_bytes, pages + 2 * lane.page_stride_bytes, lane.page_stride_bytes))
        << "layer " << lane.layer;
  }
}

TEST(Metrics, cache_11_the_hit_rate_is_told_and_histograms_count_by_bound) {
  FakeEngine fake;
  Result first, second;
  fake.engine.submit(greedy(random_ids(1, 40), 1), first.callback());
  fake.run();
  EXPECT_EQ(fake.engine.metrics().hit_rate(), 0);
  fake.engine.submit(greedy(random_ids(1, 40), 1), second.callback());
  fake.run();
  const EngineMetrics& metrics = fake.engine.metrics();
  EXPECT_EQ(metrics.hit_rate(), 39.0 / 80);
  EXPECT_EQ(metrics.prompt_tokens, 80);
  EXPECT_EQ(metrics.computed_prompt_tokens, 41);
  EXPECT_EQ(metrics.answer_tokens, 2);
  EXPECT_EQ(metrics.request_prompt_tokens.count(), 2);
  EXPECT_EQ(metrics.request_prompt_tokens.sum(), 80);

  const std::array bounds = {1.0, 2.0};
  Histogram histogram(bounds);
  for (const double value : {0.5, 1.0, 1.5, 9.0}) histogram.add(value);
  EXPECT_EQ(std::vector<int64_t>(histogram.counts().begin(), histogram.counts().end()), (std::vector<int64_t>{2, 1, 1}));
}

}  // namespace
}  // namespace m3::test
