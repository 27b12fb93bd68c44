// Who runs when, and that nothing of it shows in the answers: on a model whose logits depend on every page.
#include <algorithm>
#include <map>
#include <thread>

#include "engine/fake_engine_test.h"
#include "engine/prompt_lookup.h"
#include "engine/token_guide.h"

namespace m3::test {
namespace {

TEST(Scheduling, answers_do_not_depend_on_cache_batch_chunk_or_speculation) {
  struct Case {
    bool prefix_cache;
    int64_t max_sequences, max_step_tokens, num_pages;
    int drafts;
  };
  for (const Case& c : {Case{true, 8, 128, 64, 0}, {false, 8, 128, 64, 0}, {true, 1, 7, 64, 0}, {true, 8, 33, 14, 0},
                        {false, 8, 33, 14, 0}, {true, 4, 64, 64, 4}, {true, 8, 40, 14, 3}}) {
    FakeOptions options;
    options.num_pages = c.num_pages;
    options.max_sequences = c.max_sequences;
    options.engine.max_step_tokens = c.max_step_tokens;
    options.engine.prefix_cache = c.prefix_cache;
    options.engine.max_draft_tokens = c.drafts;
    FakeEngine fake(options);
    std::vector<GenerationRequest> requests;
    const std::vector<int32_t> shared = random_ids(1, 96);
    for (int64_t i = 0; i < 20; ++i) {
      GenerationRequest r = greedy({shared.begin(), shared.begin() + i * 5}, 5 + i % 7 * 20);
      for (const int32_t id : random_ids(i, 1 + i % 3)) r.prompt.push_back(id);
      if (i % 2 == 1) {
        r.sampling.temperature = 1.0f;
        r.sampling.seed = static_cast<uint64_t>(i);
        r.choice = 3;
      }
      requests.push_back(std::move(r));
    }
    std::vector<Result> results(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) fake.engine.submit(requests[i], results[i].callback());
    fake.run();
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(results[i].tokens, expected_answer(fake.model, requests[i], requests[i].max_tokens)) << "request " << i;
      EXPECT_EQ(results[i].last.reason, FinishReason::kLength);
    }
    EXPECT_EQ(fake.engine.metrics().preemptions > 0, c.num_pages == 14);
    EXPECT_EQ(fake.engine.metrics().prefix_hit_tokens > 0, c.prefix_cache);
  }
}

// cache-01, cache-02, cache-09: a hit at every offset of a page, and the second turn of a chat.
TEST(Scheduling, cache_01_02_a_hit_at_every_offset_gives_the_answer_of_a_run_without_cache) {
  FakeEngine fake({.num_pages = 400, .page_tokens = 8});
  const std::vector<int32_t> first = random_ids(2, 40);
  Result turn;
  fake.engine.submit(greedy(first, 10), turn.callback());
  fake.run();
  std::vector<int32_t> whole = first;
  whole.insert(whole.end(), turn.tokens.begin(), turn.tokens.end());
  for (size_t keep = 0; keep < whole.size(); ++keep) {
    GenerationRequest next = greedy({whole.begin(), whole.begin() + static_cast<int64_t>(keep)}, 3);
    next.prompt.push_back(950);  // differs from all before
    next.prompt.push_back(static_cast<int32_t>(keep));
    Result result;
    fake.engine.submit(next, result.callback());
    fake.run();
    EXPECT_EQ(result.tokens, expected_answer(fake.model, next, 3)) << keep;
    // The last token of an answer is drawn, not computed. Later requests share token 950 with earlier ones never.
    EXPECT_EQ(result.last.timings.cached_tokens, std::min<int64_t>(static_cast<int64_t>(keep), 49)) << keep;
  }
}

// sched-01: two giants share prefill, and a short prompt does not wait for them.
TEST(Scheduling, sched_01_long_prompts_share_steps_and_short_ones_pass) {
  FakeOptions options{.num_pages = 1200, .max_step_tokens = 128, .max_sequence_tokens = 9000};
  FakeEngine fake(options);
  Result a, b, brief;
  fake.engine.submit(greedy(random_ids(1, 8000), 4), a.callback());
  fake.engine.submit(greedy(random_ids(2, 8000), 4), b.callback());
  for (int i = 0; i < 10; ++i) fake.engine.step();
  EXPECT_NEAR(static_cast<double>(a.prefill.back()), static_cast<double>(b.prefill.back()), 128);
  EXPECT_EQ(a.prefill.back() + b.prefill.back(), 10 * 128);
  fake.engine.submit(greedy(random_ids(3, 600), 30), brief.callback());
  int steps = 0;
  while (brief.tokens.empty()) {
    fake.engine.step();
    ++steps;
    ASSERT_LE(steps, 10) << "half of 128 rows a step are for 600 tokens";
  }
  const int64_t before = a.prefill.back() + b.prefill.back();
  while (brief.num_finished == 0) {
    const size_t known = brief.tokens.size();
    fake.engine.step();
    EXPECT_GT(brief.tokens.size(), known) << "an answer gets a token in every step";
  }
  EXPECT_GT(a.prefill.back() + b.prefill.back(), before + 29 * 100) << "giants use what is left";
  int64_t last_of_a = 0, last_of_b = 0;
  for (int64_t step = 0; fake.engine.step(); ++step) {
    if (a.num_finished == 0) last_of_a = step;
    if (b.num_finished == 0) last_of_b = step;
  }
  // Their last 1024 tokens count as short prompts, in the order of arrival.
  EXPECT_LE(std::abs(last_of_a - last_of_b), 1024 / 128 + 1) << "equals end together";
}

TEST(Scheduling, steps_are_cut_to_the_time_that_readers_of_answers_may_wait) {
  FakeOptions options;
  options.num_pages = 600;
  options.max_sequence_tokens = 9000;
  options.engine.max_step_seconds = 1e-9;  // less than a row takes: one page a step
  FakeEngine fake(options);
  Result chat, giant;
  fake.engine.submit(greedy(random_ids(1, 20), 40), chat.callback());
  fake.engine.step();
  fake.engine.submit(greedy(random_ids(2, 5000), 1), giant.callback());
  for (int i = 0; i < 10; ++i) {
    fake.engine.step();
    EXPECT_EQ(fake.model.last_rows, (std::vector<int64_t>{1, 16})) << i;
  }
  fake.run();
}

TEST(Scheduling, requests_wait_with_a_reason_and_keep_their_order) {
  FakeEngine fake({.num_pages = 8, .max_sequences = 2});
  std::vector<Result> results(4);
  fake.engine.submit(greedy(random_ids(1, 60), 20), results[0].callback());
  fake.engine.submit(greedy(random_ids(2, 100), 4), results[1].callback());  // 7 pages: waits for the first
  fake.engine.submit(greedy(random_ids(3, 4), 4), results[2].callback());    // would fit, does not pass
  fake.engine.step();
  auto infos = fake.engine.requests();
  ASSERT_EQ(infos.size(), 3u);
  EXPECT_TRUE(infos[0].running);
  EXPECT_EQ(infos[1].wait_reason, WaitReason::kCachePages);
  EXPECT_EQ(infos[2].wait_reason, WaitReason::kBehindOthers);
  EXPECT_EQ(fake.engine.metrics().waiting_by_reason[static_cast<size_t>(WaitReason::kCachePages)], 1);
  fake.run();
  EXPECT_GT(results[1].last.timings.queue_seconds, results[0].last.timings.queue_seconds);
  for (int i = 0; i < 3; ++i) fake.engine.submit(greedy(random_ids(10 + i, 4), 4), results[3].callback()), results[3] = {};
  fake.engine.step();
  EXPECT_EQ(fake.engine.requests()[2].wait_reason, WaitReason::kMaxSequences);
}

// sched-01: what the plan promises does run together.
TEST(Scheduling, sched_01_requests_that_fill_the_cache_exactly_run_together) {
  FakeEngine fake({.num_pages = 64, .max_sequences = 8});
  std::vector<Result> results(5);
  for (int i = 0; i < 5; ++i) fake.engine.submit(greedy(random_ids(i, 200 + 18 * i), 56 - 18 * (i % 4)), results[i].callback());
  fake.engine.step();
  EXPECT_EQ(fake.engine.metrics().running, 4) << "four times 256 tokens";
  fake.run();
  EXPECT_EQ(fake.engine.metrics().preemptions, 0);
}

TEST(Scheduling, preempted_answers_go_on_where_they_were) {
  FakeOptions options{.num_pages = 12, .max_sequences = 4};
  for (const bool prefix_cache : {true, false}) {
    options.engine.prefix_cache = prefix_cache;
    FakeEngine fake(options);
    std::vector<GenerationRequest> requests;
    std::vector<Result> results(4);
    for (int i = 0; i < 4; ++i) {
      requests.push_back(greedy(random_ids(20 + i, 20), 120));
      requests[i].sampling = {.temperature = 1.0f, .repetition_penalty = 1.1f, .presence_penalty = 0.5f, .seed = 5};
      fake.engine.submit(requests[i], results[i].callback());
    }
    fake.run();
    int64_t preemptions = 0;
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(results[i].tokens, expected_answer(fake.model, requests[i], 120)) << i;
      EXPECT_TRUE(std::ranges::is_sorted(results[i].prefill)) << "progress never goes back";
      preemptions += results[i].last.timings.preemptions;
    }
    EXPECT_GT(preemptions, 0);
    EXPECT_EQ(preemptions, fake.engine.metrics().preemptions);
  }
}

TEST(Scheduling, a_full_queue_and_deadlines_answer_quickly) {
  FakeOptions options{.max_sequences = 1};
  options.engine.max_waiting = 2;
  FakeEngine fake(options);
  Result running, waiting, late;
  fake.engine.submit(greedy(random_ids(1, 10), 50), running.callback());
  fake.engine.step();
  fake.engine.submit(greedy(random_ids(2, 10), 5), waiting.callback());
  GenerationRequest overdue = greedy(random_ids(3, 10), 5);
  overdue.deadline = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  fake.engine.submit(overdue, late.callback());
  EXPECT_THROW(fake.engine.submit(greedy({1}, 1), {}), QueueFull);
  EXPECT_EQ(fake.engine.metrics().rejected_full, 1);
  fake.engine.step();
  EXPECT_EQ(late.last.reason, FinishReason::kDeadline);
  EXPECT_EQ(waiting.num_finished, 0);
  fake.run();
  EXPECT_EQ(waiting.tokens.size(), 5u);

  options.engine.max_queue_seconds = 0.3;
  FakeEngine impatient(options);
  Result first, second;
  impatient.engine.submit(greedy(random_ids(1, 10), 50), first.callback());
  impatient.engine.step();
  impatient.engine.submit(greedy(random_ids(1, 10), 50), second.callback());
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  impatient.run();
  EXPECT_EQ(first.tokens.size(), 50u) << "admitted at once";
  EXPECT_EQ(second.last.reason, FinishReason::kDeadline);
}

TEST(Scheduling, a_failing_step_or_callback_ends_its_requests_only) {
  FakeEngine fake;
  Result a, b;
  GenerationRequest request = greedy(random_ids(1, 40), 5);
  fake.engine.submit(request, a.callback());
  fake.model.fail_next = true;
  fake.engine.step();
  EXPECT_EQ(a.last.reason, FinishReason::kFailed);
  EXPECT_EQ(a.last.error, "the fake model was told to fail");
  fake.engine.check_pages();
  int calls = 0;
  fake.engine.submit(request, [&](const GenerationEvent& event) {
    if (event.kind == GenerationEvent::Kind::kToken && ++calls == 2) throw std::runtime_error("client gone");
  });
  fake.engine.submit(request, b.callback());
  fake.run();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(b.tokens, expected_answer(fake.model, request, 5));
}

TEST(Scheduling, choices_of_a_prompt_share_its_prefill) {
  FakeEngine fake({.num_pages = 100, .max_step_tokens = 64});
  GenerationRequest request = greedy(random_ids(1, 500), 8);
  request.sampling.temperature = 1;
  std::vector<Result> results(4);
  const RequestId first = fake.engine.submit(request, results[0].callback());
  std::vector<GenerationRequest> requests(4, request);
  for (uint64_t choice = 1; choice < 4; ++choice) {
    requests[choice].choice = choice;
    requests[choice].after_prompt_of = first;
    fake.engine.submit(requests[choice], results[choice].callback());
  }
  fake.engine.step();
  EXPECT_EQ(fake.engine.requests()[1].wait_reason, WaitReason::kSharedPrompt);
  fake.run();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(results[i].tokens, expected_answer(fake.model, requests[i], 8)) << i;
  EXPECT_NE(results[0].tokens, results[1].tokens);
  EXPECT_EQ(results[3].last.timings.cached_tokens, 496);
  EXPECT_LT(fake.engine.metrics().computed_prompt_tokens, 500 + 3 * 16);
}

// cache-10: drafts beside the prefix cache, and both are counted.
TEST(Scheduling, cache_10_drafts_are_accepted_where_answers_repeat_and_change_nothing) {
  for (const float temperature : {0.0f, 1.0f}) {
    FakeOptions options{.num_pages = 100, .memory = temperature == 0 ? 2 : 1};
    GenerationRequest request = greedy(random_ids(7, 30), 300);
    request.sampling.temperature = temperature;
    request.sampling.top_k = 2;
    FakeEngine plain(options);
    Result want, got;
    plain.engine.submit(request, want.callback());
    plain.run();
    options.engine.max_draft_tokens = 6;
    FakeEngine drafting(options);
    drafting.engine.submit(request, got.callback());
    drafting.run();
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(want.tokens, expected_answer(plain.model, request, 300));
    EXPECT_EQ(want.last.timings.drafted_tokens, 0);
    EXPECT_GT(got.last.timings.accepted_tokens, 5);
    EXPECT_LE(got.last.timings.accepted_tokens, got.last.timings.drafted_tokens);
    EXPECT_LT(drafting.engine.metrics().steps, plain.engine.metrics().steps - 5);
    EXPECT_EQ(drafting.engine.metrics().accepted_tokens, got.last.timings.accepted_tokens);
    // The second turn finds the first, rejected drafts or not.
    GenerationRequest next = greedy(request.prompt, 5);
    next.prompt.insert(next.prompt.end(), got.tokens.begin(), got.tokens.end());
    Result second;
    drafting.engine.submit(next, second.callback());
    drafting.run();
    EXPECT_EQ(second.last.timings.cached_tokens, 329);
    EXPECT_EQ(second.tokens, expected_answer(plain.model, next, 5));
  }
}

TEST(Scheduling, guides_decide_with_drafts_and_without) {
  for (const int drafts : {0, 4}) {
    FakeOptions options{.memory = 1};
    options.engine.max_draft_tokens = drafts;
    FakeEngine fake(options);
    std::vector<int32_t> script;
    for (int i = 0; i < 40; ++i) script.push_back(10 + i % 5);
    GenerationRequest request = greedy(random_ids(1, 10), 60);
    request.guide = std::make_shared<ScriptGuide>(script, tiny_tokenizer().size());
    Result result;
    fake.engine.submit(request, result.callback());
    fake.run();
    ASSERT_EQ(result.tokens.size(), 60u);
    EXPECT_EQ(std::vector<int32_t>(result.tokens.begin(), result.tokens.begin() + 40), script);
    EXPECT_EQ(result.last.timings.accepted_tokens > 20, drafts > 0);
  }
}

TEST(Scheduling, a_guide_that_allows_nothing_fails_its_request_alone) {
  struct Nothing : TokenGuide {
    std::vector<uint64_t> none = std::vector<uint64_t>(17);
    std::span<const uint64_t> allowed() override { return none; }
    void accept(int32_t) override {}
  };
  FakeEngine fake;
  GenerationRequest request = greedy(random_ids(1, 10), 6);
  Result failed, good;
  fake.engine.submit(request, good.callback());
  request.guide = std::make_shared<Nothing>();
  fake.engine.submit(request, failed.callback());
  fake.run();
  EXPECT_EQ(failed.last.reason, FinishReason::kFailed);
  EXPECT_NE(failed.last.error.find("no token is allowed"), std::string::npos) << failed.last.error;
  EXPECT_EQ(good.tokens.size(), 6u);
}

TEST(Scheduling, logprobs_stop_ids_and_fewest_tokens) {
  FakeEngine fake;
  GenerationRequest request = greedy(random_ids(1, 10), 20);
  const std::vector<int32_t> free_run = expected_answer(fake.model, request, 20);
  request.num_logprobs = 3;
  Result plain;
  fake.engine.submit(request, plain.callback());
  fake.run();
  EXPECT_EQ(plain.tokens, free_run);
  ASSERT_EQ(plain.logprobs.size(), 20u);
  std::vector<uint64_t> inputs(request.prompt.begin(), request.prompt.end());
  for (int i = 0; i < 20; ++i) {
    const TokenLogprobs want = token_logprobs(fake.model.logits_after(inputs), free_run[i], 3);
    EXPECT_EQ(plain.logprobs[i].chosen, want.chosen);
    EXPECT_EQ(plain.logprobs[i].top, want.top);
    inputs.push_back(static_cast<uint64_t>(free_run[i]));
  }
  request.stop_ids = {free_run[4]};
  Result stopped, longer;
  fake.engine.submit(request, stopped.callback());
  request.min_tokens = 8;
  fake.engine.submit(request, longer.callback());
  fake.run();
  EXPECT_EQ(stopped.last.reason, FinishReason::kStop);
  EXPECT_LE(stopped.tokens.size(), 5u);
  EXPECT_GE(longer.tokens.size(), 8u);
  EXPECT_EQ(std::ranges::count(std::span(longer.tokens).first(8), free_run[4]), 0);
}

MediaInput picture(float value, int64_t rows) {
  return {false, {1, 2, 2 * rows}, std::make_shared<const std::vector<float>>(4 * rows * 1176, value)};
}

// The prefix cache tells pictures apart although their placeholders are alike; features are kept by content.
TEST(Scheduling, pictures_are_part_of_what_a_prefix_is) {
  FakeOptions options{.max_step_tokens = 8};
  FakeEngine fake(options);
  const int32_t image = fake.model.config().image_token_id;
  auto ask = [&](std::vector<std::pair<float, int64_t>> pictures, int32_t last) {
    GenerationRequest request = greedy(random_ids(1, 5), 4);
    std::vector<uint64_t> rows;
    for (const auto& [value, count] : pictures) {
      request.media.push_back(picture(value, count));
      for (int64_t i = 0; i < count; ++i) {
        request.prompt.push_back(image);
        rows.push_back(FakeEngineModel::media_input(value + static_cast<float>(i)));
      }
      request.prompt.push_back(17);
    }
    request.prompt.push_back(last);
    Result result;
    fake.engine.submit(request, result.callback());
    fake.run();
    EXPECT_EQ(result.tokens, expected_answer(fake.model, request, 4, rows));
    EXPECT_EQ(result.last.timings.media_tokens, static_cast<int64_t>(rows.size()));
    return result.last.timings.cached_tokens;
  };
  EXPECT_EQ(ask({{1.0f, 20}, {5.0f, 6}}, 1), 0);
  EXPECT_EQ(fake.model.num_encoded, 2);
  EXPECT_EQ(ask({{1.0f, 20}, {5.0f, 6}}, 2), 33) << "all but the last token";
  EXPECT_EQ(fake.model.num_encoded, 2) << "neither encoded nor looked up";
  EXPECT_EQ(ask({{1.0f, 20}, {7.0f, 6}}, 1), 26) << "up to the second picture";
  EXPECT_EQ(ask({{2.0f, 20}, {5.0f, 6}}, 1), 5) << "up to the first";
  EXPECT_EQ(fake.model.num_encoded, 4) << "the picture 5 is known";
  EXPECT_EQ(fake.engine.metrics().media_cache_hits, 1);
}

TEST(MediaCache, keeps_to_its_bytes_and_forgets_the_oldest) {
  FakeEngine fake;
  MediaCache cache(100);
  auto features = [&](float value) { return fake.model.encode_media(picture(value, 10)); };  // 40 bytes
  const MediaHash a = hash_media(picture(1, 10)), b = hash_media(picture(2, 10)), c = hash_media(picture(3, 10));
  cache.add(a, features(1));
  cache.add(b, features(2));
  EXPECT_NE(cache.find(a), nullptr);
  cache.add(c, features(3));
  EXPECT_EQ(cache.bytes(), 80);
  EXPECT_EQ(cache.find(b), nullptr);
  ASSERT_NE(cache.find(a), nullptr);
  EXPECT_EQ(*cache.find(a)->features_MC.ptr<float>(), 1.0f);
  MediaInput other_shape = picture(1, 10);
  other_shape.grid = {1, 4, 10};
  EXPECT_NE(hash_media(other_shape), a) << "the same values in another grid";
}

TEST(PromptLookup, proposes_what_followed_the_last_time) {
  PromptLookup lookup;
  std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 1, 2, 3, 9, 8, 1, 2};
  EXPECT_TRUE(lookup.draft(tokens, 4).empty());
  tokens.push_back(3);
  const auto draft = lookup.draft(tokens, 3);
  EXPECT_EQ(std::vector<int32_t>(draft.begin(), draft.end()), (std::vector<int32_t>{9, 8, 1}));
  tokens.push_back(9);
  EXPECT_EQ(lookup.draft(tokens, 2).size(), 2u);
  EXPECT_EQ(lookup.draft(tokens, 0).size(), 0u);
  PromptLookup same;
  const std::vector<int32_t> run(6, 7);
  EXPECT_EQ(same.draft(run, 4).size(), 1u) << "only one token is known to follow";
}

// 500 requests of mixed lengths with random cancels: nothing leaks, nobody is stuck, memory stays.
TEST(Scheduling, five_hundred_requests_with_random_cancels) {
  for (const int drafts : {0, 3}) {
    FakeOptions options{.num_pages = 42, .max_sequences = 12, .max_step_tokens = 96, .memory = drafts > 0 ? 2 : 0};
    options.engine.max_draft_tokens = drafts;
    FakeEngine fake(options);
    Philox rng(42);
    std::vector<GenerationRequest> requests;
    std::vector<Result> results(500);
    std::vector<RequestId> ids;
    const std::vector<int32_t> shared = random_ids(1, 400);
    auto next_request = [&] {
      GenerationRequest r = greedy({shared.begin(), shared.begin() + static_cast<int64_t>(rng.below(rng.below(4) == 0 ? 400 : 40))},
                                   1 + static_cast<int64_t>(rng.below(rng.below(3) == 0 ? 220 : 40)));
      for (const int32_t id : random_ids(requests.size() % 50, 1 + static_cast<int64_t>(rng.below(20)))) r.prompt.push_back(id);
      if (rng.below(2) == 0) r.sampling = {.temperature = 0.8f, .top_k = 4, .seed = rng.next_u64()};
      return r;
    };
    int64_t resident_half_way = 0;
    while (requests.size() < 500 || fake.engine.num_requests() > 0) {
      if (resident_half_way == 0 && requests.size() >= 250) resident_half_way = resident_bytes();
      for (uint64_t i = rng.below(4); i > 0 && requests.size() < 500; --i) {
        requests.push_back(next_request());
        ids.push_back(fake.engine.submit(requests.back(), results[requests.size() - 1].callback()));
      }
      if (rng.below(4) == 0) fake.engine.cancel(ids[ids.size() - 1 - rng.below(std::min<size_t>(ids.size(), 30))]);
      fake.engine.step();
      fake.engine.check_pages();
    }
    EXPECT_EQ(fake.engine.pages().num_available(), 42);
#ifndef __SANITIZE_ADDRESS__  // which keeps freed memory for a while
    EXPECT_LT(resident_bytes() - resident_half_way, 16 << 20) << "memory grows";
#endif
    std::map<FinishReason, int> reasons;
    for (size_t i = 0; i < results.size(); ++i) {
      ASSERT_EQ(results[i].num_finished, 1) << i;
      ++reasons[results[i].last.reason];
      ASSERT_EQ(results[i].tokens, expected_answer(fake.model, requests[i], static_cast<int64_t>(results[i].tokens.size()))) << i;
    }
    EXPECT_GT(reasons[FinishReason::kCancelled], 30);
    EXPECT_GT(reasons[FinishReason::kLength], 200);
    EXPECT_EQ(reasons[FinishReason::kCancelled] + reasons[FinishReason::kLength], 500);
    EXPECT_GT(fake.engine.metrics().preemptions, 0);
    EXPECT_GT(fake.engine.metrics().pages_evicted, 0);
  }
}

}  // namespace
}  // namespace m3::test
