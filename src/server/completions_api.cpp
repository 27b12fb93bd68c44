#include "server/completions_api.h"

#include <fmt/core.h>

#include "server/json_build.h"
#include "server/request_fields.h"

namespace m3 {

namespace {

constexpr size_t kMaxPrompts = 64;

std::vector<int32_t> read_ids(const JsonValue& list, const std::string& where,
                              const ModelInfo& info) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < list.size(); ++i) {
    const JsonValue& id = list.items()[i];
    const bool fits = id.is_integer() && id.as_double() >= 0 && id.as_double() < info.num_ids;
    if (!fits)
      refuse_field(fmt::format("{}[{}]", where, i),
                   fmt::format("is no token id, want 0 to {}", info.num_ids - 1));
    ids.push_back(static_cast<int32_t>(id.as_double()));
  }
  return ids;
}

// A string, a list of strings, a list of ids, or a list of lists of ids.
void read_prompts(FieldReader& fields, const ModelInfo& info, ApiRequest& request) {
  const JsonValue* prompt = fields.take("prompt");
  if (prompt == nullptr)
    refuse_field("prompt", "is missing, want a string, a list of strings, or token ids");
  if (prompt->is_string()) {
    request.prompts.push_back({prompt->text(), {}});
  } else if (prompt->is_array() && prompt->size() > 0 && prompt->items()[0].is_number()) {
    request.prompts.push_back({"", read_ids(*prompt, "prompt", info)});
  } else if (prompt->is_array() && prompt->size() <= kMaxPrompts) {
    for (size_t i = 0; i < prompt->size(); ++i) {
      const JsonValue& item = prompt->items()[i];
      const std::string where = fmt::format("prompt[{}]", i);
      if (!item.is_string() && !item.is_array()) {
        refuse_field(where, fmt::format("is of type {}, want a string or a list of token ids",
                                        item.kind_name()));
      }
      request.prompts.push_back(item.is_string() ? RawPrompt{item.text(), {}}
                                                 : RawPrompt{"", read_ids(item, where, info)});
    }
  } else {
    refuse_field("prompt", fmt::format("want a string, token ids, or a list of 1 to {} of them",
                                       kMaxPrompts));
  }
  if (request.prompts.empty()) refuse_field("prompt", "is empty");
  for (const RawPrompt& item : request.prompts) {
    if (item.text.empty() && item.ids.empty())
      refuse_field("prompt", "is empty, want at least one token");
  }
}

class CompletionsFormat : public AnswerFormat {
 public:
  CompletionsFormat(const ApiRequest& request, const Tokenizer& tokenizer,
                    std::vector<std::string> prompt_texts)
      : tokenizer_(tokenizer), request_(request), prompt_texts_(std::move(prompt_texts)) {}

  JsonValue body(Answer& answer) override {
    JsonValue choices = JsonValue::array();
    for (size_t i = 0; i < answer.choices.size(); ++i) {
      AnswerChoice& choice = answer.choices[i];
      choices.push_back(choice_json(answer, static_cast<int>(i), echoed(i) + choice.content,
                                    choice.finish_reason));
    }
    JsonValue body = head(answer);
    body.append_member("choices", std::move(choices));
    body.append_member("usage", openai_usage(answer));
    body.append_member("timings", timings_json(answer));
    if (answer.max_tokens_clamped)
      body.append_member("max_tokens", JsonValue::integer(answer.max_tokens));
    return body;
  }

  std::string stream_begin(Answer& answer) override {
    std::string out;
    for (size_t i = 0; request_.echo && i < answer.choices.size(); ++i) {
      out += chunk(answer, static_cast<int>(i), echoed(i), JsonValue());
    }
    return out;
  }
  std::string stream_event(Answer& answer, int choice, const OutputEvent& event) override {
    return event.kind == OutputEvent::Kind::kContent
               ? chunk(answer, choice, event.text, JsonValue())
               : "";
  }
  std::string stream_choice_end(Answer& answer, int choice) override {
    return chunk(answer, choice, "", JsonValue::string(answer.choices[choice].finish_reason));
  }
  std::string stream_end(Answer& answer) override {
    std::string out;
    if (request_.include_usage) {
      JsonValue data = head(answer);
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

 private:
  static JsonValue head(const Answer& answer) {
    return json_object({{"id", answer.id},
                        {"object", "text_completion"},
                        {"created", answer.created},
                        {"model", answer.model}});
  }

  std::string chunk(Answer& answer, int choice, const std::string& text, JsonValue finish_reason) {
    JsonValue data = head(answer);
    data.append_member("choices",
                       json_array({choice_json(answer, choice, text, std::move(finish_reason))}));
    return sse_event("", data);
  }

  std::string echoed(size_t choice) const {
    return request_.echo ? prompt_texts_[choice / request_.n] : "";
  }

  // Tokens that were not sent yet go with this text.
  JsonValue choice_json(Answer& answer, int index, const std::string& text, JsonArg finish_reason) {
    AnswerChoice& choice = answer.choices[index];
    JsonValue json =
        json_object({{"index", index},
                     {"text", text},
                     {"logprobs", request_.logprobs ? logprobs_json(choice) : JsonValue()},
                     {"finish_reason", finish_reason.value}});
    if (!choice.stop_string.empty())
      json.append_member("stop_reason", JsonValue::string(choice.stop_string));
    if (request_.return_token_ids && choice.done()) {
      json.append_member("prompt_token_ids", id_list(answer.prompt_ids[index / request_.n]));
      json.append_member("token_ids", id_list(choice.token_ids));
    }
    return json;
  }

  JsonValue logprobs_json(AnswerChoice& choice) const {
    JsonValue tokens = JsonValue::array(), values = JsonValue::array(), tops = JsonValue::array(),
              offsets = JsonValue::array();
    for (; choice.tokens_sent < choice.tokens.size(); ++choice.tokens_sent) {
      const AnswerToken& token = choice.tokens[choice.tokens_sent];
      tokens.push_back(JsonValue::string(tokenizer_.decode(std::span(&token.id, 1))));
      values.push_back(finite(token.logprobs.chosen));
      JsonValue top = JsonValue::object();
      for (const auto& [id, logprob] : token.logprobs.top)
        top.set(tokenizer_.decode(std::span(&id, 1)), finite(logprob));
      tops.push_back(std::move(top));
      offsets.push_back(JsonValue::integer(static_cast<int64_t>(token.text_offset)));
    }
    return json_object({{"tokens", std::move(tokens)},
                        {"token_logprobs", std::move(values)},
                        {"top_logprobs", std::move(tops)},
                        {"text_offset", std::move(offsets)}});
  }
  static JsonValue finite(float logprob) {
    return JsonValue::number(std::max(-9999.0, static_cast<double>(logprob)));
  }

  const Tokenizer& tokenizer_;
  const ApiRequest& request_;
  const std::vector<std::string> prompt_texts_;
};

}  // namespace

ApiRequest read_completions_request(const JsonValue& body, const ModelInfo& info) {
  ApiRequest request;
  FieldReader fields(body, "");
  read_common(fields, info, request);
  read_max_tokens(fields, {"max_tokens"}, request);
  read_stop(fields, "stop", request);
  read_prompts(fields, info, request);
  request.echo = fields.boolean("echo").value_or(false);
  if (const auto logprobs = fields.integer("logprobs", 0, 20)) {
    request.logprobs = true;
    request.top_logprobs = static_cast<int>(*logprobs);
  }
  if (request.echo && request.logprobs)
    refuse_field("echo", "cannot be combined with logprobs: none are computed for a prompt");
  if (const JsonValue* options = fields.object("stream_options")) {
    if (!request.stream) refuse_field("stream_options", "needs stream: true");
    FieldReader inner(*options, "stream_options");
    request.include_usage = inner.boolean("include_usage").value_or(false);
    inner.accept({"include_obfuscation", "continuous_usage_stats"});
  }
  if (const JsonValue* format = fields.object("response_format"))
    read_answer_form(*format, "response_format", request);
  read_structured_outputs(fields, request);
  fields.not_built("suffix");
  for (std::string& path : fields.unknown()) request.ignored_fields.push_back(std::move(path));
  return request;
}

std::unique_ptr<AnswerFormat> completions_format(const ApiRequest& request,
                                                 const Tokenizer& tokenizer,
                                                 std::vector<std::string> prompt_texts) {
  return std::make_unique<CompletionsFormat>(request, tokenizer, std::move(prompt_texts));
}

}  // namespace m3
