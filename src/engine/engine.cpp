#include "engine/engine.h"

#include <algorithm>

#include "base/file.h"
#include "base/log.h"
#include "base/threads.h"
#include "engine/page_file.h"
#include "engine/plan.h"
#include "engine/token_guide.h"

namespace m3 {

namespace {

constexpr size_t kNumReasons = 5;
constexpr std::array<const char*, kNumReasons> kReasonNames = {"stop", "length", "cancelled", "deadline", "failed"};

// Below so much work in draws a parallel region costs more than it saves. In logits of greedy draws (0.7 ns each on a
// Zen 3); those of others were measured at 2 (top_k 40 of 200K ids) to 50 times that (top_p 0.95 of them).
constexpr int64_t kParallelLogits = 1 << 17;

EngineOptions completed(EngineOptions options, const EngineModelSizes& sizes) {
  if (options.max_step_tokens == 0) options.max_step_tokens = sizes.max_step_tokens;
  M3_CHECK(0 < options.max_step_tokens && options.max_step_tokens <= sizes.max_step_tokens,
           "steps of {} tokens, the model was opened for {}", options.max_step_tokens, sizes.max_step_tokens);
  M3_CHECK(sizes.max_sequences <= std::min(options.max_step_tokens, sizes.max_logit_rows),
           "{} requests run together, but a step has {} tokens and {} rows of logits", sizes.max_sequences,
           options.max_step_tokens, sizes.max_logit_rows);
  M3_CHECK(options.max_draft_tokens >= 0 && options.max_waiting >= 0, "drafts of {} tokens and a queue of {}, want 0 or more",
           options.max_draft_tokens, options.max_waiting);
  return options;
}

std::unique_ptr<PageTier> open_tier(EngineModel& model, const EngineOptions& options) {
  if (options.offload_dir.empty()) return nullptr;
  M3_CHECK(options.prefix_cache, "pages cannot be kept in {} without the prefix cache", options.offload_dir.string());
  return std::make_unique<FilePageTier>(model, options.offload_dir, options.offload_bytes);
}

}  // namespace

const char* finish_reason_name(FinishReason reason) { return kReasonNames[static_cast<size_t>(reason)]; }

Engine::Engine(EngineModel& model, const Tokenizer& tokenizer, const EngineOptions& options)
    : model_(model),
      tokenizer_(tokenizer),
      options_(completed(options, model.sizes())),
      tier_(open_tier(model, options)),
      pages_(model.sizes().num_pages, model.sizes().page_tokens, options.prefix_cache, tier_.get()),
      media_cache_(options.media_cache_bytes),
      plan_(std::make_unique<Plan>()) {
  M3_CHECK(tokenizer.size() <= model.config().text.vocab_size, "the tokenizer has {} ids, the model's vocabulary {}",
           tokenizer.size(), model.config().text.vocab_size);
  if (!options_.cache_file.empty()) load_cache();
  update_gauges();
}

// A file of another model or a damaged one costs what it would have saved, and is told.
void Engine::load_cache() {
  M3_CHECK(options_.prefix_cache, "pages cannot be taken from {} without the prefix cache", options_.cache_file.string());
  page_layout_ = model_.page_layout();
  { AtomicFile writable(options_.cache_file); }  // throws now rather than at the end, where the work would be lost
  if (!std::filesystem::exists(options_.cache_file)) return;
  try {
    const int64_t pages = load_pages(options_.cache_file, page_layout_, model_, pages_);
    log_info("{}: {} cache pages from before", options_.cache_file.string(), pages);
  } catch (const std::exception& error) {
    log_warn("{}; the cache begins with {} pages, and the file is replaced at the end", error.what(), pages_.num_idle());
  }
}

void Engine::save_cache() {
  if (options_.cache_file.empty()) return;
  const int64_t pages = save_pages(options_.cache_file, page_layout_, model_, pages_);
  log_info("{}: {} cache pages for the next start", options_.cache_file.string(), pages);
}

Engine::~Engine() = default;

int64_t Engine::max_request_tokens() const {
  const EngineModelSizes& sizes = model_.sizes();
  return std::min(sizes.num_pages * sizes.page_tokens, sizes.max_sequence_tokens);
}

RequestId Engine::submit(GenerationRequest request, GenerationCallback callback) {
  SequencePtr sequence = prepare(std::move(request), std::move(callback));
  if (static_cast<int64_t>(waiting_.size()) >= options_.max_waiting) {
    ++metrics_.rejected_full;
    throw QueueFull(fmt::format("{} requests are waiting already: try again later", waiting_.size()));
  }
  const RequestId id = next_id_++;
  enqueue(std::move(sequence), id);
  return id;
}

Engine::SequencePtr Engine::prepare(GenerationRequest request, GenerationCallback callback) const {
  const auto prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const int64_t vocab_size = model_.config().text.vocab_size;
  M3_CHECK(prompt_tokens > 0, "the prompt is empty");
  M3_CHECK(request.max_tokens > 0, "max_tokens is {}, want at least 1", request.max_tokens);
  M3_CHECK(prompt_tokens < max_request_tokens(),
           "the prompt has {} tokens and the answer needs at least one, the context holds {}", prompt_tokens,
           max_request_tokens());
  for (const int32_t id : request.prompt) {
    M3_CHECK(0 <= id && id < vocab_size, "prompt id {} is outside the vocabulary of {}", id, vocab_size);
  }
  auto sequence = std::make_unique<Sequence>(Sequence{.decoder = StreamDecoder(tokenizer_, true)});
  std::vector<PlaceholderItem> items;
  int64_t row = 0;
  for (const MediaInput& media : request.media) {
    const int64_t rows = model_.num_features(media.grid);
    items.push_back({media.is_video, rows});
    sequence->media.push_back({.hash = hash_media(media), .first_row = row, .num_rows = rows});
    row += rows;
  }
  sequence->placeholders = map_placeholders(model_.config(), request.prompt, items);
  for (Sequence::Media& item : sequence->media) {
    for (size_t i = 0; i < sequence->placeholders.order.size(); ++i) {
      const int64_t at = sequence->placeholders.order[i];
      if (item.first_row <= at && at < item.first_row + item.num_rows) item.last_position = sequence->placeholders.positions[i];
    }
  }
  sequence->tokens = request.prompt;
  sequence->keys = sequence_keys(request.prompt, sequence->placeholders, sequence->media);
  sequence->prompt_tokens = prompt_tokens;
  sequence->max_tokens = std::min(request.max_tokens, max_request_tokens() - prompt_tokens);
  sequence->stop = StopStrings(request.stop);
  sequence->timings.prompt_tokens = prompt_tokens;
  sequence->timings.media_tokens = row;
  sequence->submitted = EngineClock::now();
  sequence->request = std::move(request);
  sequence->callback = std::move(callback);
  return sequence;
}

void Engine::enqueue(SequencePtr sequence, RequestId id) {
  sequence->id = id;
  if (sequence->request.after_prompt_of >= id) sequence->request.after_prompt_of = 0;  // nobody waits for the future
  waiting_.push_back(std::move(sequence));
  update_gauges();
}

void Engine::cancel(RequestId id) {
  for (auto* queue : {&waiting_, &running_}) {
    for (SequencePtr& sequence : *queue) sequence->cancelled |= sequence->id == id;
  }
}

void Engine::end_overdue(EngineClock::time_point now) {
  for (auto* queue : {&waiting_, &running_}) {
    for (SequencePtr& sequence : *queue) {
      const auto& deadline = sequence->request.deadline;
      const bool queued_too_long = options_.max_queue_seconds > 0 && !sequence->was_admitted &&
                                   seconds_between(sequence->submitted, now) > options_.max_queue_seconds;
      if (sequence->cancelled) {
        finish(*sequence, FinishReason::kCancelled);
      } else if ((deadline && now >= *deadline) || queued_too_long) {
        finish(*sequence, FinishReason::kDeadline);
      }
    }
  }
  erase_finished();
}

bool Engine::step() {
  const EngineClock::time_point start = EngineClock::now();
  bool worked = false;
  try {
    end_overdue(start);
    admit();
    worked = encode_one_media();
    plan_step();
    if (!plan_->parts.empty()) {
      run_step();
      worked = true;
    }
  } catch (const std::exception& error) {
    // Our own mistake: nobody may wait for ever because of it.
    log_error("the engine failed, all requests end: {}", error.what());
    for (auto* queue : {&waiting_, &running_}) {
      for (const SequencePtr& sequence : *queue) finish(*sequence, FinishReason::kFailed, error.what());
    }
    worked = true;
  }
  erase_finished();
  if (worked) {
    ++metrics_.steps;
    metrics_.step_seconds.add(seconds_between(start, EngineClock::now()));
  }
  update_gauges();
  return worked;
}

// One picture or clip a step, so that answers go on between them. What the prefix cache holds is not encoded again.
bool Engine::encode_one_media() {
  for (const SequencePtr& sequence : running_) {
    Sequence::Media* item = sequence->missing_media();
    if (item == nullptr) continue;
    const EngineClock::time_point start = EngineClock::now();
    MediaInput& input = sequence->request.media[item - sequence->media.data()];
    item->features = media_cache_.find(item->hash);
    if (item->features != nullptr) {
      ++metrics_.media_cache_hits;
    } else {
      try {
        item->features = model_.encode_media(input);
      } catch (const std::exception& error) {
        finish(*sequence, FinishReason::kFailed, error.what());
        return true;
      }
      media_cache_.add(item->hash, item->features);
      ++metrics_.media_encoded;
    }
    input.patches_NP.reset();
    const double seconds = seconds_between(start, EngineClock::now());
    sequence->timings.media_seconds += seconds;
    metrics_.media_seconds.add(seconds);
    return true;
  }
  return false;
}

void Engine::run_step() {
  Plan& plan = *plan_;
  const EngineClock::time_point start = EngineClock::now();
  Tensor logits_LV;
  try {
    logits_LV = model_.step(plan.input());
  } catch (const std::exception& error) {
    log_warn("a step of {} tokens failed: {}", plan.num_rows(), error.what());
    for (const Plan::Part& part : plan.parts) finish(*part.sequence, FinishReason::kFailed, error.what());
    return;
  }
  const double seconds = seconds_between(start, EngineClock::now());
  metrics_.step_model_seconds.add(seconds);
  metrics_.step_tokens.add(static_cast<double>(plan.num_rows()));
  if (plan.has_prompts) {
    const double per_row = seconds / static_cast<double>(plan.num_rows());
    seconds_per_row_ = seconds_per_row_ == 0 ? per_row : 0.7 * seconds_per_row_ + 0.3 * per_row;
  }

  // Draws of different requests have nothing in common: threads share them.
  std::vector<int64_t> first_rows(plan.parts.size());
  int64_t row = 0, work = 0;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    first_rows[i] = row;
    row += plan.parts[i].num_logits;
    const bool greedy = plan.parts[i].sequence->request.sampling.temperature == 0;
    work += plan.parts[i].num_logits * model_.config().text.vocab_size * (greedy ? 1 : 16);
  }
  const auto draw_part = [&](int64_t i) { draw(i, logits_LV, first_rows[i]); };
  if (row > 1 && work >= kParallelLogits) {
    parallel_for_dynamic(static_cast<int64_t>(plan.parts.size()), draw_part);
  } else {
    for (size_t i = 0; i < plan.parts.size(); ++i) draw_part(static_cast<int64_t>(i));
  }
  for (size_t i = 0; i < plan.parts.size(); ++i) accept_drawn(i);
}

// Draws a token from each row of logits, as far as the draft agrees with what is drawn. A draw depends on its row, the
// seed and the position alone, so the answer is the one that single steps would give.
void Engine::draw(size_t index, const Tensor& logits_LV, int64_t first_row) {
  Plan::Part& part = plan_->parts[index];
  Sequence& sequence = *part.sequence;
  const GenerationRequest& request = sequence.request;
  try {
    for (int64_t i = 0; i < part.num_logits; ++i) {
      const Tensor row = logits_LV[first_row + i];
      const std::span<float> logits_V(row.ptr<float>(), row.numel());
      std::vector<float> raw_V;
      if (request.num_logprobs >= 0) raw_V.assign(logits_V.begin(), logits_V.end());
      if (sequence.num_answered() < request.min_tokens) {
        for (const int32_t id : request.stop_ids) logits_V[id] = -std::numeric_limits<float>::infinity();
      }
      const std::span<const int32_t> tokens = sequence.tokens;
      SamplingState state;
      state.prompt = tokens.first(sequence.prompt_tokens);
      state.answer = tokens.subspan(sequence.prompt_tokens);
      if (request.guide != nullptr) state.allowed = request.guide->allowed();
      state.num_ids = tokenizer_.size();
      state.choice = request.choice;
      state.position = tokens.size();
      const int32_t id = sample(logits_V, request.sampling, state);
      if (request.guide != nullptr) request.guide->accept(id);
      sequence.tokens.push_back(id);
      sequence.keys.push_back(static_cast<PageCache::Key>(id));
      Plan::Drawn drawn{id, std::nullopt};
      if (request.num_logprobs >= 0) drawn.logprobs = token_logprobs(raw_V, id, request.num_logprobs);
      part.drawn.push_back(std::move(drawn));
      const bool ends = std::ranges::find(request.stop_ids, id) != request.stop_ids.end();
      if (ends || i >= static_cast<int64_t>(sequence.draft.size()) || sequence.draft[i] != id) return;
    }
  } catch (const std::exception& error) {
    part.error = error.what();
  }
}

void Engine::accept_drawn(size_t index) {
  Plan::Part& part = plan_->parts[index];
  Sequence& sequence = *part.sequence;
  const auto num_drawn = static_cast<int64_t>(part.drawn.size()), num_drafted = static_cast<int64_t>(sequence.draft.size());
  const int64_t num_accepted = std::min(std::max<int64_t>(num_drawn - 1, 0), num_drafted);
  // Rows of rejected drafts hold keys of tokens that are not in the sequence: the next step writes over them.
  sequence.num_cached += part.num_rows - num_drafted + num_accepted;
  sequence.timings.drafted_tokens += num_drafted;
  sequence.timings.accepted_tokens += num_accepted;
  metrics_.drafted_tokens += num_drafted;
  metrics_.accepted_tokens += num_accepted;
  if (part.is_prompt) metrics_.computed_prompt_tokens += part.num_rows;
  sequence.draft.clear();
  pages_.publish(sequence.pages, sequence.computed());
  report_prefill(sequence);

  const int64_t answered_before = sequence.num_answered() - num_drawn;
  // Tokens of one step come together: each counts for its share of the time.
  const double gap_seconds =
      seconds_between(sequence.last_token, EngineClock::now()) / static_cast<double>(std::max<int64_t>(num_drawn, 1));
  for (int64_t i = 0; i < num_drawn && !sequence.finished; ++i) {
    accept_token(sequence, part.drawn[i].id, std::move(part.drawn[i].logprobs), answered_before + i + 1, gap_seconds);
  }
  if (!part.error.empty() && !sequence.finished) finish(sequence, FinishReason::kFailed, part.error);
}

void Engine::report_prefill(Sequence& sequence) {
  const int64_t done = std::min(sequence.num_cached, sequence.prompt_tokens);
  if (done <= sequence.prompt_reported || sequence.finished) return;
  sequence.prompt_reported = done;
  GenerationEvent event{.kind = GenerationEvent::Kind::kPrefill, .prompt_done = done, .timings = sequence.timings};
  if (std::string error; !emit(sequence, std::move(event), &error)) finish(sequence, FinishReason::kFailed, error);
}

// Token number `answered` of the answer.
void Engine::accept_token(Sequence& sequence, int32_t id, std::optional<TokenLogprobs> logprobs, int64_t answered,
                          double gap_seconds) {
  const EngineClock::time_point now = EngineClock::now();
  GenerationTimings& timings = sequence.timings;
  if (answered == 1) {
    sequence.first_token = now;
    timings.prefill_seconds = std::max(0.0, seconds_between(sequence.admitted, now) - timings.media_seconds);
    metrics_.first_token_seconds.add(seconds_between(sequence.submitted, now));
    metrics_.prefill_seconds.add(timings.prefill_seconds);
    metrics_.prompt_tokens += sequence.prompt_tokens;
  } else {
    metrics_.token_gap_seconds.add(gap_seconds);
  }
  sequence.last_token = now;
  timings.answer_tokens = answered;
  timings.decode_seconds = seconds_between(sequence.first_token, now);
  ++metrics_.answer_tokens;

  GenerationEvent event{.kind = GenerationEvent::Kind::kToken, .token = id, .logprobs = std::move(logprobs)};
  event.text = sequence.stop.push(sequence.decoder.push(id));
  if (std::string error; !emit(sequence, std::move(event), &error)) {
    finish(sequence, FinishReason::kFailed, error);
    return;
  }
  const std::vector<int32_t>& stop_ids = sequence.request.stop_ids;
  if (sequence.stop.found() || std::ranges::find(stop_ids, id) != stop_ids.end()) {
    finish(sequence, FinishReason::kStop);
  } else if (answered >= sequence.max_tokens) {
    finish(sequence, FinishReason::kLength);
  }
}

void Engine::finish(Sequence& sequence, FinishReason reason, std::string error) {
  if (sequence.finished) return;
  sequence.finished = true;
  pages_.release(sequence.pages, sequence.computed());
  sequence.num_cached = 0;
  ++metrics_.finished[static_cast<size_t>(reason)];
  metrics_.request_seconds.add(seconds_between(sequence.submitted, EngineClock::now()));
  metrics_.request_prompt_tokens.add(static_cast<double>(sequence.prompt_tokens));
  metrics_.request_answer_tokens.add(static_cast<double>(sequence.timings.answer_tokens));
  if (sequence.timings.answer_tokens > 0) metrics_.decode_seconds.add(sequence.timings.decode_seconds);

  GenerationEvent event{.kind = GenerationEvent::Kind::kFinish, .prompt_done = sequence.prompt_reported};
  event.text = sequence.stop.push(sequence.decoder.finish()) + sequence.stop.finish();
  event.reason = reason;
  event.stop_string = sequence.stop.found_string();
  event.error = std::move(error);
  event.timings = sequence.timings;
  if (std::string failure; !emit(sequence, std::move(event), &failure)) {
    log_warn("the last event of request {} was not taken: {}", sequence.id, failure);
  }
}

bool Engine::emit(Sequence& sequence, GenerationEvent event, std::string* error) {
  if (!sequence.callback) return true;
  try {
    sequence.callback(event);
    return true;
  } catch (const std::exception& thrown) {
    *error = fmt::format("its callback threw: {}", thrown.what());
    return false;
  }
}

void Engine::erase_finished() {
  for (auto* queue : {&waiting_, &running_}) {
    std::erase_if(*queue, [](const SequencePtr& sequence) { return sequence->finished; });
  }
}

void Engine::update_gauges() {
  metrics_.running = static_cast<int64_t>(running_.size());
  metrics_.waiting = static_cast<int64_t>(waiting_.size());
  metrics_.pages_total = pages_.num_pages();
  metrics_.pages_free = pages_.num_free();
  metrics_.pages_cached = pages_.num_idle();
  metrics_.pages_used = pages_.num_pages() - pages_.num_available();
  metrics_.page_bytes = model_.sizes().page_bytes;
  metrics_.offload_slots = tier_ != nullptr ? tier_->num_slots() : 0;
  metrics_.offload_used = pages_.num_stored();
  metrics_.pages_evicted = pages_.counts().evicted;
  metrics_.pages_offloaded = pages_.counts().stored;
  metrics_.pages_restored = pages_.counts().restored;
  metrics_.offload_failures = pages_.counts().failed;
  metrics_.media_cache_bytes = media_cache_.bytes();
  metrics_.waiting_by_reason = {};
  for (const SequencePtr& sequence : waiting_) ++metrics_.waiting_by_reason[static_cast<size_t>(sequence->wait_reason)];
}

std::vector<RequestInfo> Engine::requests() const {
  std::vector<RequestInfo> list;
  const EngineClock::time_point now = EngineClock::now();
  for (const auto* queue : {&running_, &waiting_}) {
    for (const SequencePtr& s : *queue) {
      list.push_back({.id = s->id,
                      .running = queue == &running_,
                      .wait_reason = s->wait_reason,
                      .prompt_tokens = s->prompt_tokens,
                      .cached_tokens = s->timings.cached_tokens,
                      .prompt_done = s->prompt_reported,
                      .answer_tokens = s->timings.answer_tokens,
                      .cache_pages = static_cast<int64_t>(s->pages.ids.size()),
                      .preemptions = s->timings.preemptions,
                      .age_seconds = seconds_between(s->submitted, now)});
    }
  }
  return list;
}

void Engine::check_pages() const {
  std::vector<const PageCache::Pages*> held;
  for (const auto* queue : {&running_, &waiting_}) {
    for (const SequencePtr& sequence : *queue) held.push_back(&sequence->pages);
  }
  pages_.check(held);
}

}  // namespace m3
