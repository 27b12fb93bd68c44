#include "server/answer_reader.h"

namespace m3 {

AnswerReader::AnswerReader(const ApiRequest& request, const Tokenizer& tokenizer,
                           std::string_view prompt_tail)
    : tokenizer_(tokenizer),
      stop_(request.stop),
      one_call_(!request.parallel_tool_calls),
      logprobs_(request.logprobs),
      token_ids_(request.return_token_ids),
      decoder_(tokenizer, true),
      stop_strings_(stop_) {
  if (request.prompts.empty()) parser_.emplace(tokenizer, request.tools, prompt_tail);
}

void AnswerReader::push(int32_t id, const std::optional<TokenLogprobs>& logprobs,
                        AnswerChoice& choice, const Sink& sink) {
  if (cut_) return;  // the engine was a few tokens ahead
  ++choice.num_tokens;
  if (token_ids_) choice.token_ids.push_back(id);
  const bool was_reasoning = parser_ && parser_->parser().in_reasoning();
  const size_t offset = choice.content.size();
  std::vector<OutputEvent> fresh;
  if (parser_) {
    parser_->push(id, fresh);
  } else if (std::string text = decoder_.push(id); !text.empty()) {
    fresh.push_back({OutputEvent::Kind::kContent, -1, std::move(text)});
  }
  const bool is_reasoning = parser_ && parser_->parser().in_reasoning();
  if (was_reasoning && is_reasoning) ++choice.num_reasoning_tokens;
  // Markers are no text, and reasoning is no part of the message.
  if (logprobs_ && logprobs && !is_reasoning && !tokenizer_.is_added(id))
    choice.tokens.push_back({id, *logprobs, offset});
  take(fresh, choice, sink);
}

void AnswerReader::take(const std::vector<OutputEvent>& fresh, AnswerChoice& choice,
                        const Sink& sink) {
  using Kind = OutputEvent::Kind;
  for (const OutputEvent& event : fresh) {
    if (cut_) return;
    if (event.kind != Kind::kContent) {
      release_held(choice, sink);
      const bool ends_call = event.kind == Kind::kCallEnd;
      emit(event, choice, sink);
      cut_ = ends_call && one_call_;
      continue;
    }
    std::string text = stop_strings_.push(event.text);
    if (!text.empty()) emit({Kind::kContent, -1, std::move(text)}, choice, sink);
    if (!stop_strings_.found()) continue;
    choice.stop_string = stop_strings_.found_string();
    cut_ = true;
  }
}

void AnswerReader::emit(const OutputEvent& event, AnswerChoice& choice, const Sink& sink) {
  choice.append(event);
  sink(event);
}

// What could have begun a stop string, where other things follow.
void AnswerReader::release_held(AnswerChoice& choice, const Sink& sink) {
  if (stop_.empty()) return;
  std::string text = stop_strings_.finish();
  stop_strings_ = StopStrings(stop_);
  if (!text.empty()) emit({OutputEvent::Kind::kContent, -1, std::move(text)}, choice, sink);
}

void AnswerReader::finish(FinishReason reason, AnswerChoice& choice, const Sink& sink) {
  std::vector<OutputEvent> fresh;
  if (parser_) {
    parser_->finish(fresh);
  } else if (std::string text = decoder_.finish(); !text.empty()) {
    fresh.push_back({OutputEvent::Kind::kContent, -1, std::move(text)});
  }
  if (!cut_) {
    take(fresh, choice, sink);
    release_held(choice, sink);
  }
  const bool stopped = cut_ || reason == FinishReason::kStop;
  choice.finish_reason = !stopped                                              ? "length"
                         : choice.calls.empty() || !choice.stop_string.empty() ? "stop"
                                                                               : "tool_calls";
  // A call that max_tokens cut is no fault of the model.
  if (parser_ && stopped && !cut_) choice.parse_error = parser_->result().parse_error;
}

}  // namespace m3
