// The engine used from many threads at once. Built with ThreadSanitizer too.
#include "engine/engine_thread.h"

#include <atomic>
#include <future>
#include <thread>

#include "engine/fake_engine_test.h"

namespace m3::test {
namespace {

TEST(EngineThread, clients_of_many_threads_get_their_own_answers) {
  FakeOptions options{.num_pages = 60, .max_sequences = 8};
  options.engine.max_draft_tokens = 2;
  FakeEngine fake(options);
  constexpr int kClients = 8, kEach = 25;
  std::atomic<int> cancelled = 0;
  {
    EngineThread front(fake.engine);
    auto client = [&](int c) {
      Philox rng(static_cast<uint64_t>(c));
      for (int i = 0; i < kEach; ++i) {
        GenerationRequest request = greedy(random_ids(rng.below(5), 1 + static_cast<int64_t>(rng.below(100))), 1 + static_cast<int64_t>(rng.below(30)));
        const std::vector<int32_t> want = expected_answer(fake.model, request, request.max_tokens);
        Result result;
        std::promise<void> ended;
        const auto collect = result.callback();
        const bool gives_up = rng.below(4) == 0;
        const RequestId id = front.submit(request, [&](const GenerationEvent& event) {
          collect(event);
          if (event.kind == GenerationEvent::Kind::kFinish) ended.set_value();
        });
        if (gives_up) front.cancel(id);
        if (i % 5 == 0) {
          const EngineMetrics metrics = front.metrics();
          EXPECT_LE(metrics.pages_free + metrics.pages_cached + metrics.pages_used, 60);
          front.requests();
        }
        ended.get_future().wait();
        ASSERT_TRUE(std::equal(result.tokens.begin(), result.tokens.end(), want.begin()));
        if (result.last.reason == FinishReason::kCancelled) {
          ++cancelled;
        } else {
          EXPECT_EQ(result.tokens.size(), want.size());
        }
      }
    };
    std::vector<std::thread> threads;
    for (int c = 0; c < kClients; ++c) threads.emplace_back(client, c);
    for (std::thread& thread : threads) thread.join();
    const EngineMetrics metrics = front.metrics();
    EXPECT_EQ(metrics.finished[static_cast<size_t>(FinishReason::kLength)] + cancelled, kClients * kEach);
  }
  fake.engine.check_pages();
  EXPECT_EQ(fake.engine.pages().num_available(), 60);
}

TEST(EngineThread, stopping_drains_or_cancels_and_refuses_what_comes_later) {
  for (const double drain_seconds : {10.0, 0.0}) {
    FakeEngine fake({.num_pages = 300, .max_sequence_tokens = 4000});
    EngineThread front(fake.engine);
    std::vector<Result> results(6);
    for (size_t i = 0; i < results.size(); ++i) front.submit(greedy(random_ids(i, 20), drain_seconds > 0 ? 50 : 3000), results[i].callback());
    EXPECT_FALSE(front.stopped());
    front.stop(drain_seconds);
    EXPECT_TRUE(front.stopped());
    for (const Result& result : results) {
      EXPECT_EQ(result.num_finished, 1);
      EXPECT_EQ(result.last.reason, drain_seconds > 0 ? FinishReason::kLength : FinishReason::kCancelled);
    }
    EXPECT_THROW(front.submit(greedy({1}, 1), {}), EngineStopped);
  }
}

TEST(EngineThread, what_can_never_run_is_refused_on_the_calling_thread) {
  FakeOptions options{.max_sequences = 1};
  options.engine.max_waiting = 0;
  FakeEngine fake(options);
  EngineThread front(fake.engine);
  EXPECT_THROW(front.submit(greedy({}, 1), {}), Error);
  EXPECT_THROW(front.submit(greedy({5000}, 1), {}), Error);
  EXPECT_THROW(front.submit(greedy({1}, 1), {}), QueueFull) << "a queue of none";
  EXPECT_EQ(front.metrics().rejected_full, 1);
}

}  // namespace
}  // namespace m3::test
