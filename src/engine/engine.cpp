#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "ops/embed/embed.h"

namespace m3 {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
  }
  return "?";
}

// A request and its place in the cache: the first num_cached of `tokens` (prompt and answer) have their keys
// and values in `pages`.
struct Engine::Running {
  RequestId id;
  GenerationRequest request;
  GenerationCallback callback;
  std::vector<int32_t> tokens;
  int64_t prompt_tokens = 0, max_tokens = 0;
  int64_t num_cached = 0;
  std::vector<int32_t> pages;

  Arena feature_arena;
  Tensor features_FC;  // in the order of feature_positions
  PlaceholderMap placeholders;
  std::vector<int32_t> step_feature_rows;

  StreamDecoder decoder;
  StopStrings stop;
  GenerationTimings timings;
  Clock::time_point prefill_start, first_token;
  bool cancelled = false, finished = false;

  int64_t num_pending() const { return static_cast<int64_t>(tokens.size()) - num_cached; }
  int64_t num_answered() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
};

// One call of the model: the storage behind StepInput, and whose logits come back.
struct Engine::Plan {
  struct Part {
    Running* request;
    int64_t count;
    bool wants_logits;
  };
  std::vector<Part> parts;
  std::vector<int32_t> ids, cu_q = {0}, seq_lens, page_table, logit_rows;
  std::vector<FeatureRows> features;
  int64_t max_pages = 0;
};

Engine::Engine(Model& model, const Tokenizer& tokenizer, const EngineOptions& options)
    : model_(model),
      tokenizer_(tokenizer),
      options_(options),
      cache_(model.make_cache((options.cache_tokens + model.config().text.block_size - 1) /
                              model.config().text.block_size)),
      pool_(cache_.num_pages()) {
  const StepSizes& sizes = model.options().step;
  M3_CHECK(0 < options.max_step_tokens && options.max_step_tokens <= sizes.max_tokens,
           "steps of {} tokens, the model was opened for {}", options.max_step_tokens, sizes.max_tokens);
  M3_CHECK(tokenizer.size() <= model.config().text.vocab_size, "the tokenizer has {} ids, the model's vocabulary {}",
           tokenizer.size(), model.config().text.vocab_size);
}

Engine::~Engine() = default;

RequestId Engine::submit(GenerationRequest request, GenerationCallback callback) {
  const auto prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const int64_t capacity = cache_.num_pages() * cache_.page_tokens();
  M3_CHECK(prompt_tokens > 0, "the prompt is empty");
  M3_CHECK(request.max_tokens > 0, "max_tokens is {}, want at least 1", request.max_tokens);
  M3_CHECK(prompt_tokens < capacity, "the prompt has {} tokens and the answer needs at least one, the context holds {}",
           prompt_tokens, capacity);
  for (const int32_t id : request.prompt) {
    M3_CHECK(0 <= id && id < model_.config().text.vocab_size, "prompt id {} is outside the vocabulary of {}", id,
             model_.config().text.vocab_size);
  }
  std::vector<PlaceholderItem> items;
  for (const MediaInput& media : request.media) items.push_back({media.is_video, model_.num_features(media.grid)});
  PlaceholderMap placeholders = map_placeholders(model_.config(), request.prompt, items);

  auto running = std::make_unique<Running>(Running{.id = next_id_++,
                                                   .request = std::move(request),
                                                   .callback = std::move(callback),
                                                   .decoder = StreamDecoder(tokenizer_, true)});
  running->tokens = running->request.prompt;
  running->prompt_tokens = prompt_tokens;
  running->max_tokens = std::min(running->request.max_tokens, capacity - prompt_tokens);
  running->placeholders = std::move(placeholders);
  running->stop = StopStrings(running->request.stop);
  running->timings.prompt_tokens = prompt_tokens;
  waiting_.push_back(std::move(running));
  return waiting_.back()->id;
}

void Engine::cancel(RequestId id) {
  for (auto& running : waiting_) running->cancelled |= running->id == id;
  for (auto& running : running_) running->cancelled |= running->id == id;
}

// First come, first served; a request gets all pages that it can ever need, so that it cannot be stopped
// half way by others.
void Engine::admit() {
  while (!waiting_.empty()) {
    Running& next = *waiting_.front();
    const int64_t tokens = next.prompt_tokens + next.max_tokens;
    const int64_t pages = (tokens + cache_.page_tokens() - 1) / cache_.page_tokens();
    const auto max_sequences = model_.options().step.max_sequences;
    if (pages > pool_.num_free() || static_cast<int64_t>(running_.size()) >= max_sequences) return;
    for (int64_t i = 0; i < pages; ++i) next.pages.push_back(pool_.take());
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    encode_media(next);
    next.prefill_start = Clock::now();
  }
}

void Engine::encode_media(Running& running) {
  if (running.request.media.empty()) return;
  const Clock::time_point start = Clock::now();
  const int64_t hidden = model_.config().text.hidden_size;
  const auto total = static_cast<int64_t>(running.placeholders.positions.size());
  const DType dtype = model_.activation_dtype();
  Arena encoded_arena("encoded media", total * hidden * dtype_bytes(dtype) + Arena::kAlignment);
  running.feature_arena = Arena("media features", total * hidden * dtype_bytes(dtype) + Arena::kAlignment);
  const Tensor encoded_FC = encoded_arena.alloc("features", dtype, {total, hidden});
  int64_t row = 0;
  for (MediaInput& media : running.request.media) {
    const int64_t count = model_.num_features(media.grid);
    const Tensor patches_NP(const_cast<float*>(media.patches_NP->data()), DType::kF32,
                            {media.grid.num_patches(), model_.config().vision->patch_numel()});
    model_.encode_media(media.grid, patches_NP, encoded_FC.rows(row, row + count));
    media.patches_NP.reset();
    row += count;
  }
  running.features_FC = running.feature_arena.alloc("features", dtype, {total, hidden});
  gather_rows(Tensor(running.placeholders.order.data(), DType::kI32, {total}), encoded_FC, running.features_FC);
  running.timings.media_seconds = seconds_since(start);
}

// Answers first, one token each; what is left of the step goes to prompts in the order of arrival.
Engine::Plan Engine::plan_step() {
  Plan plan;
  int64_t budget = options_.max_step_tokens;
  auto add = [&](Running& running, int64_t count) {
    plan.parts.push_back({&running, count, count == running.num_pending()});
    budget -= count;
    plan.max_pages = std::max(plan.max_pages, static_cast<int64_t>(running.pages.size()));
  };
  for (auto& running : running_) {
    if (running->num_answered() > 0 && budget > 0) add(*running, 1);
  }
  for (auto& running : running_) {
    if (running->num_answered() == 0 && budget > 0) add(*running, std::min(budget, running->num_pending()));
  }
  for (const Plan::Part& part : plan.parts) {
    Running& running = *part.request;
    const int64_t begin = running.num_cached, end = begin + part.count;
    const auto first_row = static_cast<int64_t>(plan.ids.size());
    plan.ids.insert(plan.ids.end(), running.tokens.begin() + begin, running.tokens.begin() + end);
    plan.cu_q.push_back(static_cast<int32_t>(plan.ids.size()));
    plan.seq_lens.push_back(static_cast<int32_t>(end));
    plan.page_table.insert(plan.page_table.end(), running.pages.begin(), running.pages.end());
    plan.page_table.resize(plan.seq_lens.size() * plan.max_pages, -1);
    if (part.wants_logits) plan.logit_rows.push_back(static_cast<int32_t>(plan.ids.size()) - 1);

    const std::vector<int32_t>& positions = running.placeholders.positions;
    const auto from = std::lower_bound(positions.begin(), positions.end(), begin);
    const auto to = std::lower_bound(from, positions.end(), end);
    if (from == to) continue;
    running.step_feature_rows.clear();
    for (auto it = from; it != to; ++it) {
      running.step_feature_rows.push_back(static_cast<int32_t>(first_row + *it - begin));
    }
    plan.features.push_back(
        {running.step_feature_rows, running.features_FC.rows(from - positions.begin(), to - positions.begin())});
  }
  return plan;
}

void Engine::run_step(Plan& plan) {
  StepInput input;
  input.ids_T = plan.ids;
  input.cu_q = plan.cu_q;
  input.seq_lens = plan.seq_lens;
  input.page_table = plan.page_table;
  input.max_pages = plan.max_pages;
  input.features = plan.features;
  input.logit_rows = plan.logit_rows;
  const Tensor logits_LV = model_.step(input, cache_);

  int64_t row = 0;
  for (const Plan::Part& part : plan.parts) {
    Running& running = *part.request;
    running.num_cached += part.count;
    if (running.num_answered() == 0) {
      emit(running, {.kind = GenerationEvent::Kind::kPrefill, .prompt_done = running.num_cached});
    }
    if (!part.wants_logits) continue;
    const Tensor logits_V = logits_LV[row++];
    accept_token(running, {logits_V.ptr<float>(), static_cast<size_t>(logits_V.numel())});
  }
}

void Engine::accept_token(Running& running, std::span<float> logits_V) {
  SamplingState state;
  const std::span<const int32_t> tokens = running.tokens;
  state.prompt = tokens.first(running.prompt_tokens);
  state.answer = tokens.subspan(running.prompt_tokens);
  state.num_ids = tokenizer_.size();
  state.position = tokens.size();
  const int32_t id = sample(logits_V, running.request.sampling, state);

  if (running.num_answered() == 0) {
    running.first_token = Clock::now();
    running.timings.prefill_seconds = seconds_since(running.prefill_start);
  }
  running.tokens.push_back(id);
  running.timings.answer_tokens = running.num_answered();
  running.timings.decode_seconds = seconds_since(running.first_token);
  emit(running, {.kind = GenerationEvent::Kind::kToken,
                 .token = id,
                 .text = running.stop.push(running.decoder.push(id))});

  const std::vector<int32_t>& stop_ids = running.request.stop_ids;
  if (running.stop.found() || std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end()) {
    finish(running, FinishReason::kStop);
  } else if (running.num_answered() >= running.max_tokens) {
    finish(running, FinishReason::kLength);
  }
}

void Engine::finish(Running& running, FinishReason reason) {
  running.finished = true;
  for (const int32_t page : running.pages) pool_.give_back(page);
  running.pages.clear();
  emit(running, {.kind = GenerationEvent::Kind::kFinish,
                 .text = running.stop.push(running.decoder.finish()) + running.stop.finish(),
                 .reason = reason,
                 .timings = running.timings});
}

void Engine::emit(Running& running, GenerationEvent event) {
  if (running.callback) running.callback(event);
}

void Engine::drop_cancelled(std::deque<std::unique_ptr<Running>>& requests) {
  for (auto& running : requests) {
    if (running->cancelled) finish(*running, FinishReason::kCancelled);
  }
  std::erase_if(requests, [](const auto& running) { return running->finished; });
}

bool Engine::step() {
  drop_cancelled(waiting_);
  drop_cancelled(running_);
  admit();
  if (running_.empty()) return false;
  Plan plan = plan_step();
  run_step(plan);
  std::erase_if(running_, [](const auto& running) { return running->finished; });
  return true;
}

}  // namespace m3
