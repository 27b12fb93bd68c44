#include "server/generation_job.h"

#include "base/log.h"
#include "server/json_build.h"

namespace m3 {

GenerationJob::GenerationJob(JobServices services, ApiFamily family, ApiRequest request,
                             std::shared_ptr<HttpResponder> responder)
    : services_(services),
      family_(family),
      request_(std::move(request)),
      responder_(std::move(responder)),
      last_write_(Clock::now().time_since_epoch().count()) {}

void GenerationJob::submit(std::vector<Part> parts) {
  answer_.choices.resize(parts.size());
  for (const Part& part : parts)
    readers_.emplace_back(request_, services_.tokenizer, part.prompt_tail);
  const auto self = shared_from_this();
  num_unfinished_ = parts.size();
  std::vector<RequestId> ids;
  try {
    for (size_t i = 0; i < parts.size(); ++i) {
      GenerationRequest& generation = parts[i].generation;
      generation.choice = i % request_.n;
      if (i % request_.n != 0) generation.after_prompt_of = ids[i - i % request_.n];
      ids.push_back(
          services_.engine.submit(std::move(generation), [self, i](const GenerationEvent& event) {
            self->post({static_cast<int>(i), event});
          }));
    }
  } catch (const std::exception& error) {
    for (const RequestId id : ids) services_.engine.cancel(id);
    if (dynamic_cast<const QueueFull*>(&error)) {
      services_.metrics.rejected("queue_full");
      throw ApiError(429, "too many requests are waiting; try again later", "", "queue_full");
    }
    if (dynamic_cast<const EngineStopped*>(&error)) throw ApiError(503, "the server is stopping");
    throw ApiError(400, error.what());
  }
  {
    const std::lock_guard lock(mutex_);
    ids_ = std::move(ids);
  }
  if (request_.stream) {
    responder_->begin_stream(200, "text/event-stream", headers_);
    responder_->write(format_->stream_begin(answer_));
  }
  responder_->on_gone([weak = weak_from_this()] {
    if (const auto job = weak.lock()) job->cancel(ApiError(499, "the client left"));
  });
  services_.answers.post([self] { self->drain(); });  // what came meanwhile, and from here on
}

void GenerationJob::cancel(ApiError why) {
  std::vector<RequestId> ids;
  {
    const std::lock_guard lock(mutex_);
    if (!cancelled_) cancelled_ = std::move(why);
    ids = ids_;
  }
  for (const RequestId id : ids) services_.engine.cancel(id);
}

void GenerationJob::ping_if_quiet(Clock::duration quiet) {
  const Clock::time_point last{Clock::duration(last_write_.load())};
  if (request_.stream && Clock::now() - last >= quiet) post({-1, {}});
}

void GenerationJob::post(Pending pending) {
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back(std::move(pending));
    if (std::exchange(scheduled_, true)) return;
  }
  services_.answers.post([self = shared_from_this()] { self->drain(); });
}

void GenerationJob::drain() {
  for (;;) {
    std::vector<Pending> batch;
    {
      const std::lock_guard lock(mutex_);
      if (pending_.empty()) {
        scheduled_ = false;
        return;
      }
      batch.swap(pending_);
    }
    try {
      for (const Pending& pending : batch) {
        if (pending.choice >= 0 && pending.event.kind == GenerationEvent::Kind::kFinish)
          --num_unfinished_;
        if (over_) continue;
        if (pending.choice >= 0) {
          handle(pending.choice, pending.event);
        } else if (unsent_.empty()) {
          unsent_ = format_->stream_ping();
        }
      }
    } catch (const std::exception& error) {  // our own mistake; the engine and other requests go on
      log_error("{}: {}", answer_.request_id, error.what());
      fail(ApiError(500, "internal error"));
    }
    if (!unsent_.empty()) {
      responder_->write(unsent_);
      unsent_.clear();
      last_write_ = Clock::now().time_since_epoch().count();
    }
    if (!over_ || num_unfinished_ > 0) continue;
    if (auto callback = std::exchange(on_end_, nullptr)) callback(*this, status_);
  }
}

void GenerationJob::handle(int choice, const GenerationEvent& event) {
  if (answer_.choices[choice].done()) return;
  switch (event.kind) {
    case GenerationEvent::Kind::kPrefill:
      saw_prefill_ = true;
      if (choice != 0) return;
      if (request_.stream && request_.return_progress && !saw_token_) {
        const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start_).count();
        unsent_ += format_->stream_progress(
            answer_, {answer_.prompt_tokens, event.timings.cached_tokens, event.prompt_done, ms});
      }
      return;
    case GenerationEvent::Kind::kToken:
      return handle_token(choice, event);
    case GenerationEvent::Kind::kFinish:
      return handle_finish(choice, event);
  }
}

void GenerationJob::handle_token(int choice, const GenerationEvent& event) {
  if (!std::exchange(saw_token_, true)) {
    answer_.first_token_ms =
        std::chrono::duration<double, std::milli>(Clock::now() - start_).count();
  }
  AnswerReader& reader = readers_[choice];
  const bool was_cut = reader.cut();
  reader.push(event.token, event.logprobs, answer_.choices[choice], sink(choice));
  if (reader.cut() && !was_cut) {
    const std::lock_guard lock(mutex_);
    services_.engine.cancel(ids_[choice]);
  }
}

void GenerationJob::handle_finish(int choice, const GenerationEvent& event) {
  AnswerChoice& state = answer_.choices[choice];
  state.timings = event.timings;
  if (choice == 0) answer_.cached_tokens = event.timings.cached_tokens;
  const bool ended_well =
      event.reason == FinishReason::kStop || event.reason == FinishReason::kLength;
  if (!ended_well && !readers_[choice].cut()) return fail(failure(event));
  readers_[choice].finish(event.reason, state, sink(choice));
  services_.metrics.finished(state.finish_reason == "length" ? "length" : "stop");
  if (!state.parse_error.empty()) services_.metrics.parse_error();
  if (request_.stream) unsent_ += format_->stream_choice_end(answer_, choice);
  for (const AnswerChoice& other : answer_.choices) {
    if (!other.done()) return;
  }
  complete();
}

AnswerReader::Sink GenerationJob::sink(int choice) {
  return [this, choice](const OutputEvent& event) {
    if (request_.stream) unsent_ += format_->stream_event(answer_, choice, event);
  };
}

void GenerationJob::complete() {
  if (request_.stream) {
    unsent_ += format_->stream_end(answer_);
    responder_->write(std::exchange(unsent_, {}));
    responder_->end();
  } else {
    responder_->send(200, "application/json", format_->body(answer_).dump(), headers_);
  }
  end(200);
}

ApiError GenerationJob::failure(const GenerationEvent& event) {
  if (event.reason == FinishReason::kDeadline && !saw_prefill_ && !saw_token_) {
    services_.metrics.rejected("queue_timeout");
    return ApiError(429, "the request waited too long for a place; try again later", "",
                    "queue_timeout");
  }
  if (event.reason == FinishReason::kDeadline)
    return ApiError(504, "the answer took longer than the server's time limit");
  if (event.reason == FinishReason::kFailed) {
    log_error("{}: {}", answer_.request_id, event.error);
    return ApiError(500, "the engine could not go on with this request; the server's log says why");
  }
  const std::lock_guard lock(mutex_);
  return cancelled_.value_or(ApiError(503, "the server is stopping"));
}

void GenerationJob::fail(const ApiError& error) {
  {
    const std::lock_guard lock(mutex_);
    for (const RequestId id : ids_) services_.engine.cancel(id);
  }
  const bool left = error.status == 499;
  services_.metrics.finished(left ? "abort" : "error");
  if (left) services_.metrics.client_abort();
  if (request_.stream) {
    responder_->write(unsent_ + format_->stream_error(answer_, error));
    responder_->end();
  } else {
    HttpHeaders headers = headers_;
    if (error.status == 429 || error.status == 503) headers.emplace_back("Retry-After", "2");
    responder_->send(error.status, "application/json",
                     error_json(family_, error, answer_.request_id).dump(), std::move(headers));
  }
  unsent_.clear();
  end(error.status);
}

void GenerationJob::end(int status) {
  over_ = true;
  status_ = status;
}

}  // namespace m3
