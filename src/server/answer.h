// An answer while it grows, and what turns it into the JSON of an API family. One worker at a time
// touches an answer.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/api_error.h"
#include "server/api_request.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace m3 {

struct AnswerCall {
  std::string id, name;
  std::string arguments;  // JSON text, as streamed
};

// Reasoning, content and calls in the order in which they came.
struct AnswerItem {
  enum class Kind : uint8_t { kReasoning, kContent, kCall };
  Kind kind;
  std::string text;  // of reasoning or content
  int call = -1;     // index of the call
};

struct AnswerToken {
  int32_t id = -1;
  TokenLogprobs logprobs;
  size_t text_offset = 0;  // in the content, where the token's text begins
};

struct AnswerChoice {
  std::string reasoning, content;
  std::vector<AnswerCall> calls;
  std::vector<AnswerItem> items;
  std::vector<AnswerToken> tokens;  // of the content and the calls, if logprobs are asked for
  size_t tokens_sent = 0;           // of `tokens`, by a stream
  std::vector<int32_t> token_ids;   // all, if asked for
  std::string finish_reason;        // stop, length, tool_calls; empty while it grows
  std::string stop_string;          // that ended it
  std::string parse_error;
  int64_t num_tokens = 0, num_reasoning_tokens = 0;
  GenerationTimings timings;
  bool done() const { return !finish_reason.empty(); }
  // Takes in what the output parser says; the call ids are new.
  void append(const OutputEvent& event);
};

struct Answer {
  std::string id;  // of the object; carries the request id
  std::string request_id, model, thinking_mode;
  int64_t created = 0;  // Unix seconds
  int64_t prompt_tokens = 0, cached_tokens = 0, image_tokens = 0, video_tokens = 0;
  bool max_tokens_clamped = false;
  int64_t max_tokens = 0;
  double first_token_ms = 0;
  std::vector<std::vector<int32_t>> prompt_ids;  // if asked for
  std::vector<AnswerChoice> choices;

  int64_t completion_tokens() const;
  int64_t reasoning_tokens() const;
};

struct PrefillProgress {
  int64_t total = 0, cached = 0, processed = 0;
  double time_ms = 0;
};

// One object per request. The stream functions return server-sent events ready for the wire;
// `answer` holds what came so far, the event included.
class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;
  virtual JsonValue body(Answer& answer) = 0;
  virtual std::string stream_begin(Answer& answer) = 0;
  virtual std::string stream_event(Answer& answer, int choice, const OutputEvent& event) = 0;
  virtual std::string stream_choice_end(Answer& answer, int choice) = 0;
  virtual std::string stream_end(Answer& answer) = 0;
  virtual std::string stream_error(Answer& answer, const ApiError& error) = 0;
  virtual std::string stream_progress(Answer& answer, const PrefillProgress& progress);
  // After 15 s without an event.
  virtual std::string stream_ping() { return ": ping\n\n"; }
};

std::string sse_event(std::string_view name,
                      const JsonValue& data);  // no `event:` line if the name is empty

JsonValue timings_json(const Answer& answer);
// prompt_tokens, completion_tokens, total_tokens and their details: chat and completions.
JsonValue openai_usage(const Answer& answer);
// {cached_tokens, image_tokens, video_tokens}, the media only where there are some.
JsonValue prompt_details(const Answer& answer);
void add_media_tokens(const Answer& answer, JsonValue& usage);
JsonValue id_list(const std::vector<int32_t>& ids);

}  // namespace m3
