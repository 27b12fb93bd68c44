#include "server/answer.h"

#include <fmt/core.h>

#include <atomic>
#include <random>

#include "server/json_build.h"

namespace m3 {

namespace {

// Unique in this run, and unlike those of another run.
std::string new_call_id() {
  static const uint64_t run = std::random_device{}();
  static std::atomic<uint64_t> next = 0;
  return fmt::format("call_{:08x}{:08x}", run & 0xffffffff, ++next);
}

}  // namespace

void AnswerChoice::append(const OutputEvent& event) {
  using Kind = OutputEvent::Kind;
  if (event.kind == Kind::kCallBegin) {
    calls.push_back({new_call_id(), event.text, ""});
    items.push_back({AnswerItem::Kind::kCall, "", event.call});
  } else if (event.kind == Kind::kCallArguments) {
    calls[event.call].arguments += event.text;
  } else if (event.kind != Kind::kCallEnd) {
    const bool is_content = event.kind == Kind::kContent;
    (is_content ? content : reasoning) += event.text;
    const auto kind = is_content ? AnswerItem::Kind::kContent : AnswerItem::Kind::kReasoning;
    if (items.empty() || items.back().kind != kind) items.push_back({kind, "", -1});
    items.back().text += event.text;
  }
}

int64_t Answer::completion_tokens() const {
  int64_t sum = 0;
  for (const AnswerChoice& choice : choices) sum += choice.num_tokens;
  return sum;
}

int64_t Answer::reasoning_tokens() const {
  int64_t sum = 0;
  for (const AnswerChoice& choice : choices) sum += choice.num_reasoning_tokens;
  return sum;
}

std::string sse_event(std::string_view name, const JsonValue& data) {
  const std::string text = data.dump();
  return name.empty() ? fmt::format("data: {}\n\n", text)
                      : fmt::format("event: {}\ndata: {}\n\n", name, text);
}

std::string AnswerFormat::stream_progress(Answer& answer, const PrefillProgress& progress) {
  return {};
}

// The names of llama-server's `timings`, of the first choice.
JsonValue timings_json(const Answer& answer) {
  const GenerationTimings& t = answer.choices.front().timings;
  const double predicted_ms = t.decode_seconds * 1e3;
  return json_object({{"cache_n", t.cached_tokens},
                      {"prompt_n", t.prompt_tokens - t.cached_tokens},
                      {"prompt_ms", (t.prefill_seconds + t.media_seconds) * 1e3},
                      {"prompt_per_second", t.prefill_rate()},
                      {"predicted_n", t.answer_tokens},
                      {"predicted_ms", predicted_ms},
                      {"predicted_per_second", t.answer_tokens > 1 ? t.decode_rate() : 0.0},
                      {"queue_ms", t.queue_seconds * 1e3},
                      {"ttft_ms", answer.first_token_ms}});
}

void add_media_tokens(const Answer& answer, JsonValue& usage) {
  if (answer.image_tokens > 0)
    usage.append_member("image_tokens", JsonValue::integer(answer.image_tokens));
  if (answer.video_tokens > 0)
    usage.append_member("video_tokens", JsonValue::integer(answer.video_tokens));
}

JsonValue prompt_details(const Answer& answer) {
  JsonValue details = json_object({{"cached_tokens", answer.cached_tokens}});
  add_media_tokens(answer, details);
  return details;
}

JsonValue openai_usage(const Answer& answer) {
  return json_object({{"prompt_tokens", answer.prompt_tokens},
                      {"completion_tokens", answer.completion_tokens()},
                      {"total_tokens", answer.prompt_tokens + answer.completion_tokens()},
                      {"prompt_tokens_details", prompt_details(answer)},
                      {"completion_tokens_details",
                       json_object({{"reasoning_tokens", answer.reasoning_tokens()}})}});
}

JsonValue id_list(const std::vector<int32_t>& ids) {
  JsonValue list = JsonValue::array();
  for (const int32_t id : ids) list.push_back(JsonValue::integer(int64_t{id}));
  return list;
}

}  // namespace m3
