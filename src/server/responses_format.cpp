#include <fmt/core.h>

#include "server/json_build.h"
#include "server/responses_api.h"

namespace m3 {

namespace {

JsonValue text_part(const std::string& text) {
  return json_object({{"type", "output_text"},
                      {"text", text},
                      {"annotations", JsonValue::array()},
                      {"logprobs", JsonValue::array()}});
}
JsonValue reasoning_part(const std::string& text) {
  return json_object({{"type", "reasoning_text"}, {"text", text}});
}

class ResponsesFormat : public AnswerFormat {
 public:
  explicit ResponsesFormat(const ApiRequest& request) : echo_(request.echo_fields) {}

  JsonValue body(Answer& answer) override {
    JsonValue output = JsonValue::array();
    const AnswerChoice& choice = answer.choices.front();
    for (size_t i = 0; i < choice.items.size(); ++i) output.push_back(item_json(answer, i, true));
    const bool cut = choice.finish_reason == "length";
    return response(answer, cut ? "incomplete" : "completed", std::move(output), JsonValue(), true);
  }

  std::string stream_begin(Answer& answer) override {
    const JsonValue begun = response(answer, "in_progress", JsonValue::array(), JsonValue(), false);
    std::string out = event("response.created", {{"response", begun}});
    out += event("response.in_progress", {{"response", begun}});
    return out;
  }

  // The answer's last item is the one that the event belongs to.
  std::string stream_event(Answer& answer, int, const OutputEvent& e) override {
    if (e.kind == OutputEvent::Kind::kCallEnd) return {};
    const auto index = static_cast<int>(answer.choices.front().items.size()) - 1;
    std::string out;
    if (index != open_) {
      out = close(answer);
      open_ = index;
      out += event("response.output_item.added",
                   {{"output_index", index}, {"item", item_json(answer, index, false)}});
      if (!is_call(answer)) out += part_event(answer, "response.content_part.added", "");
    }
    if (e.kind == OutputEvent::Kind::kCallBegin) return out;
    if (e.kind == OutputEvent::Kind::kCallArguments) {
      return out +
             event(
                 "response.function_call_arguments.delta",
                 {{"item_id", item_id(answer, index)}, {"output_index", index}, {"delta", e.text}});
    }
    return out + text_event(answer, "delta", "delta", e.text);
  }

  std::string stream_choice_end(Answer& answer, int choice) override { return close(answer); }

  std::string stream_end(Answer& answer) override {
    const JsonValue whole = body(answer);
    const bool cut = answer.choices.front().finish_reason == "length";
    return event(cut ? "response.incomplete" : "response.completed", {{"response", whole}});
  }

  std::string stream_error(Answer& answer, const ApiError& error) override {
    const JsonValue problem = json_object(
        {{"code", error.code.empty() ? "server_error" : error.code}, {"message", error.what()}});
    return event("response.failed",
                 {{"response", response(answer, "failed", JsonValue::array(), problem, false)}});
  }

 private:
  using Members = std::initializer_list<std::pair<const char*, JsonArg>>;

  // Numbers the events: build them in the order in which they are sent.
  std::string event(const std::string& type, Members members) {
    JsonValue data = json_object({{"type", type}, {"sequence_number", sequence_++}});
    for (const auto& [key, arg] : members) data.append_member(key, arg.value);
    return sse_event(type, data);
  }

  static const AnswerItem& item_of(const Answer& answer, size_t index) {
    return answer.choices.front().items[index];
  }
  bool is_call(const Answer& answer) const {
    return item_of(answer, open_).kind == AnswerItem::Kind::kCall;
  }
  static std::string item_id(const Answer& answer, size_t index) {
    const auto kind = item_of(answer, index).kind;
    const char* prefix = kind == AnswerItem::Kind::kCall      ? "fc"
                         : kind == AnswerItem::Kind::kContent ? "msg"
                                                              : "rs";
    return fmt::format("{}_{}_{}", prefix, answer.request_id, index);
  }

  // `done`: with what it holds; otherwise as announced, empty.
  static JsonValue item_json(const Answer& answer, size_t index, bool done) {
    const AnswerItem& item = item_of(answer, index);
    const char* status = done ? "completed" : "in_progress";
    const std::string id = item_id(answer, index);
    JsonValue parts = JsonValue::array();
    switch (item.kind) {
      case AnswerItem::Kind::kReasoning:
        if (done) parts.push_back(reasoning_part(item.text));
        return json_object({{"id", id},
                            {"type", "reasoning"},
                            {"summary", JsonValue::array()},
                            {"content", std::move(parts)},
                            {"status", status}});
      case AnswerItem::Kind::kContent:
        if (done) parts.push_back(text_part(item.text));
        return json_object({{"id", id},
                            {"type", "message"},
                            {"role", "assistant"},
                            {"content", std::move(parts)},
                            {"status", status}});
      case AnswerItem::Kind::kCall:
        break;
    }
    const AnswerCall& call = answer.choices.front().calls[item.call];
    return json_object({{"id", id},
                        {"type", "function_call"},
                        {"call_id", call.id},
                        {"name", call.name},
                        {"arguments", done ? call.arguments : ""},
                        {"status", status}});
  }

  std::string part_event(const Answer& answer, const char* type, const std::string& text) {
    const bool is_text = item_of(answer, open_).kind == AnswerItem::Kind::kContent;
    return event(type, {{"item_id", item_id(answer, open_)},
                        {"output_index", open_},
                        {"content_index", 0},
                        {"part", is_text ? text_part(text) : reasoning_part(text)}});
  }
  std::string text_event(const Answer& answer, const char* what, const char* key,
                         const std::string& text) {
    const bool is_text = item_of(answer, open_).kind == AnswerItem::Kind::kContent;
    JsonValue data = json_object(
        {{"type", fmt::format("response.{}_text.{}", is_text ? "output" : "reasoning", what)},
         {"sequence_number", sequence_++},
         {"item_id", item_id(answer, open_)},
         {"output_index", open_},
         {"content_index", 0},
         {key, text}});
    if (is_text) data.append_member("logprobs", JsonValue::array());
    return sse_event(data.find("type")->text(), data);
  }

  // The `done` events of the open item.
  std::string close(const Answer& answer) {
    if (open_ < 0) return {};
    const AnswerItem& item = item_of(answer, open_);
    std::string out;
    if (item.kind == AnswerItem::Kind::kCall) {
      const AnswerCall& call = answer.choices.front().calls[item.call];
      out = event("response.function_call_arguments.done", {{"item_id", item_id(answer, open_)},
                                                            {"output_index", open_},
                                                            {"name", call.name},
                                                            {"arguments", call.arguments}});
    } else {
      out = text_event(answer, "done", "text", item.text);
      out += part_event(answer, "response.content_part.done", item.text);
    }
    out += event("response.output_item.done",
                 {{"output_index", open_}, {"item", item_json(answer, open_, true)}});
    open_ = -1;
    return out;
  }

  JsonValue response(const Answer& answer, const char* status, JsonValue output, JsonValue error,
                     bool with_usage) const {
    const AnswerChoice& choice = answer.choices.front();
    JsonValue json =
        json_object({{"id", answer.id},
                     {"object", "response"},
                     {"created_at", answer.created},
                     {"status", status},
                     {"model", answer.model},
                     {"error", std::move(error)},
                     {"incomplete_details", choice.finish_reason == "length" && with_usage
                                                ? json_object({{"reason", "max_output_tokens"}})
                                                : JsonValue()},
                     {"output", std::move(output)},
                     {"usage", with_usage ? usage(answer) : JsonValue()},
                     {"thinking_mode", answer.thinking_mode}});
    for (size_t i = 0; i < echo_.size(); ++i) json.append_member(echo_.keys()[i], echo_.items()[i]);
    if (!choice.parse_error.empty())
      json.append_member("parse_error", JsonValue::string(choice.parse_error));
    return json;
  }

  static JsonValue usage(const Answer& answer) {
    return json_object(
        {{"input_tokens", answer.prompt_tokens},
         {"input_tokens_details", prompt_details(answer)},
         {"output_tokens", answer.completion_tokens()},
         {"output_tokens_details", json_object({{"reasoning_tokens", answer.reasoning_tokens()}})},
         {"total_tokens", answer.prompt_tokens + answer.completion_tokens()}});
  }

  const JsonValue echo_;
  int64_t sequence_ = 0;
  int open_ = -1;  // index of the item that is growing
};

}  // namespace

std::unique_ptr<AnswerFormat> responses_format(const ApiRequest& request) {
  return std::make_unique<ResponsesFormat>(request);
}

}  // namespace m3
