// One choice of an answer: tokens in, events of its text out. Applies stop strings to the content:
// reasoning and the arguments of calls are not cut by them.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/stop_strings.h"
#include "server/answer.h"
#include "server/api_request.h"
#include "text/output_parser.h"

namespace m3 {

class AnswerReader {
 public:
  // `prompt_tail` decides whether a chat answer begins in reasoning; plain completions have no
  // protocol at all.
  AnswerReader(const ApiRequest& request, const Tokenizer& tokenizer, std::string_view prompt_tail);

  // `sink` sees each event right after `choice` took it in.
  using Sink = std::function<void(const OutputEvent& event)>;
  void push(int32_t id, const std::optional<TokenLogprobs>& logprobs, AnswerChoice& choice,
            const Sink& sink);
  // The answer needs no more tokens: a stop string came, or the only call that was wanted is
  // complete.
  bool cut() const { return cut_; }
  void finish(FinishReason reason, AnswerChoice& choice, const Sink& sink);

 private:
  void take(const std::vector<OutputEvent>& fresh, AnswerChoice& choice, const Sink& sink);
  void emit(const OutputEvent& event, AnswerChoice& choice, const Sink& sink);
  void release_held(AnswerChoice& choice, const Sink& sink);

  const Tokenizer& tokenizer_;
  const std::vector<std::string> stop_;
  const bool one_call_, logprobs_, token_ids_;
  std::optional<TokenOutputParser> parser_;
  StreamDecoder decoder_;  // of plain completions
  StopStrings stop_strings_;
  bool cut_ = false;
};

}  // namespace m3
