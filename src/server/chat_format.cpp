#include <fmt/core.h>

#include "server/chat_api.h"
#include "server/json_build.h"

namespace m3 {

namespace {

JsonValue token_bytes(std::string_view bytes) {
  JsonValue list = JsonValue::array();
  for (const char c : bytes) list.push_back(JsonValue::integer(int64_t{static_cast<uint8_t>(c)}));
  return list;
}

JsonValue token_entry(const Tokenizer& tokenizer, int32_t id, float logprob) {
  return json_object({{"token", tokenizer.decode(std::span(&id, 1))},
                      {"logprob", std::max(-9999.0, static_cast<double>(logprob))},
                      {"bytes", token_bytes(tokenizer.bytes(id))}});
}

class ChatFormat : public AnswerFormat {
 public:
  ChatFormat(const ApiRequest& request, const Tokenizer& tokenizer)
      : tokenizer_(tokenizer),
        include_usage_(request.include_usage),
        logprobs_(request.logprobs),
        token_ids_(request.return_token_ids) {}

  JsonValue body(Answer& answer) override {
    JsonValue choices = JsonValue::array();
    for (size_t i = 0; i < answer.choices.size(); ++i)
      choices.push_back(choice_body(answer.choices[i], i));
    JsonValue body = head(answer, "chat.completion");
    body.append_member("choices", std::move(choices));
    body.append_member("usage", openai_usage(answer));
    body.append_member("timings", timings_json(answer));
    if (answer.max_tokens_clamped)
      body.append_member("max_tokens", JsonValue::integer(answer.max_tokens));
    if (token_ids_) body.append_member("prompt_token_ids", id_list(answer.prompt_ids.front()));
    return body;
  }

  std::string stream_begin(Answer& answer) override {
    std::string out;
    for (size_t i = 0; i < answer.choices.size(); ++i) {
      out +=
          chunk(answer, static_cast<int>(i), json_object({{"role", "assistant"}, {"content", ""}}));
    }
    return out;
  }

  std::string stream_event(Answer& answer, int choice, const OutputEvent& event) override {
    using Kind = OutputEvent::Kind;
    switch (event.kind) {
      case Kind::kReasoning:
        return chunk(answer, choice,
                     json_object({{"reasoning_content", event.text}, {"reasoning", event.text}}));
      case Kind::kContent:
        return chunk(answer, choice, json_object({{"content", event.text}}));
      case Kind::kCallBegin: {
        const AnswerCall& call = answer.choices[choice].calls[event.call];
        return call_chunk(
            answer, choice,
            json_object({{"index", event.call},
                         {"id", call.id},
                         {"type", "function"},
                         {"function", json_object({{"name", call.name}, {"arguments", ""}})}}));
      }
      case Kind::kCallArguments:
        return call_chunk(answer, choice,
                          json_object({{"index", event.call},
                                       {"function", json_object({{"arguments", event.text}})}}));
      case Kind::kCallEnd:
        return {};
    }
    return {};
  }

  std::string stream_choice_end(Answer& answer, int choice) override {
    const AnswerChoice& state = answer.choices[choice];
    JsonValue data =
        chunk_json(answer, choice, JsonValue::object(), JsonValue::string(state.finish_reason));
    if (!state.parse_error.empty())
      data.append_member("parse_error", JsonValue::string(state.parse_error));
    if (token_ids_) data.append_member("token_ids", id_list(state.token_ids));
    data.append_member("timings", timings_json(answer));
    return sse_event("", data);
  }

  std::string stream_end(Answer& answer) override {
    std::string out;
    if (include_usage_) {
      JsonValue data = head(answer, "chat.completion.chunk");
      data.append_member("choices", JsonValue::array());
      data.append_member("usage", openai_usage(answer));
      data.append_member("timings", timings_json(answer));
      out = sse_event("", data);
    }
    return out + "data: [DONE]\n\n";
  }

  std::string stream_error(Answer& answer, const ApiError& error) override {
    return sse_event("", error_json(ApiFamily::kOpenAi, error, answer.request_id));
  }

  std::string stream_progress(Answer& answer, const PrefillProgress& progress) override {
    JsonValue data = head(answer, "chat.completion.chunk");
    data.append_member("choices", JsonValue::array());
    data.append_member("prompt_progress", json_object({{"total", progress.total},
                                                       {"cache", progress.cached},
                                                       {"processed", progress.processed},
                                                       {"time_ms", progress.time_ms}}));
    return sse_event("", data);
  }

 private:
  static JsonValue head(const Answer& answer, const char* object) {
    return json_object({{"id", answer.id},
                        {"object", object},
                        {"created", answer.created},
                        {"model", answer.model},
                        {"thinking_mode", answer.thinking_mode}});
  }

  JsonValue choice_body(const AnswerChoice& choice, size_t index) const {
    JsonValue message = json_object({{"role", "assistant"}});
    const bool has_content = !choice.content.empty() || choice.calls.empty();
    message.append_member("content", has_content ? JsonValue::string(choice.content) : JsonValue());
    if (!choice.reasoning.empty()) {
      message.append_member("reasoning_content", JsonValue::string(choice.reasoning));
      message.append_member("reasoning", JsonValue::string(choice.reasoning));
    }
    if (!choice.calls.empty()) {
      JsonValue calls = JsonValue::array();
      for (const AnswerCall& call : choice.calls) {
        calls.push_back(json_object(
            {{"id", call.id},
             {"type", "function"},
             {"function", json_object({{"name", call.name}, {"arguments", call.arguments}})}}));
      }
      message.append_member("tool_calls", std::move(calls));
    }
    JsonValue body = json_object(
        {{"index", static_cast<int64_t>(index)},
         {"message", std::move(message)},
         {"logprobs", logprobs_ ? chat_logprobs(choice.tokens, tokenizer_) : JsonValue()},
         {"finish_reason", choice.finish_reason}});
    if (!choice.stop_string.empty())
      body.append_member("stop_reason", JsonValue::string(choice.stop_string));
    if (!choice.parse_error.empty())
      body.append_member("parse_error", JsonValue::string(choice.parse_error));
    if (token_ids_) body.append_member("token_ids", id_list(choice.token_ids));
    return body;
  }

  JsonValue chunk_json(Answer& answer, int choice, JsonValue delta, JsonValue finish_reason) {
    AnswerChoice& state = answer.choices[choice];
    JsonValue logprobs;
    if (logprobs_ && state.tokens_sent < state.tokens.size()) {
      logprobs = chat_logprobs(std::span(state.tokens).subspan(state.tokens_sent), tokenizer_);
      state.tokens_sent = state.tokens.size();
    }
    JsonValue data = head(answer, "chat.completion.chunk");
    data.append_member("choices",
                       json_array({json_object({{"index", choice},
                                                {"delta", std::move(delta)},
                                                {"logprobs", std::move(logprobs)},
                                                {"finish_reason", std::move(finish_reason)}})}));
    return data;
  }
  std::string chunk(Answer& answer, int choice, JsonValue delta) {
    return sse_event("", chunk_json(answer, choice, std::move(delta), JsonValue()));
  }
  std::string call_chunk(Answer& answer, int choice, JsonValue call) {
    return chunk(answer, choice, json_object({{"tool_calls", json_array({std::move(call)})}}));
  }

  const Tokenizer& tokenizer_;
  const bool include_usage_, logprobs_, token_ids_;
};

}  // namespace

JsonValue chat_logprobs(std::span<const AnswerToken> tokens, const Tokenizer& tokenizer) {
  JsonValue content = JsonValue::array();
  for (const AnswerToken& token : tokens) {
    JsonValue entry = token_entry(tokenizer, token.id, token.logprobs.chosen);
    JsonValue top = JsonValue::array();
    for (const auto& [id, logprob] : token.logprobs.top)
      top.push_back(token_entry(tokenizer, id, logprob));
    entry.append_member("top_logprobs", std::move(top));
    content.push_back(std::move(entry));
  }
  return json_object({{"content", std::move(content)}, {"refusal", nullptr}});
}

std::unique_ptr<AnswerFormat> chat_format(const ApiRequest& request, const Tokenizer& tokenizer) {
  return std::make_unique<ChatFormat>(request, tokenizer);
}

}  // namespace m3
