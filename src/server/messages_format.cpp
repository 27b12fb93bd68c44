#include "server/json_build.h"
#include "server/messages_api.h"

namespace m3 {

namespace {

// Thinking here is signed by nobody; clients only carry the field back.
constexpr const char* kSignature = "m3-unsigned";

std::string stop_reason(const AnswerChoice& choice) {
  if (choice.finish_reason == "tool_calls") return "tool_use";
  if (choice.finish_reason == "length") return "max_tokens";
  return choice.stop_string.empty() ? "end_turn" : "stop_sequence";
}

JsonValue usage_json(const Answer& answer) {
  JsonValue usage = json_object({{"input_tokens", answer.prompt_tokens - answer.cached_tokens},
                                 {"cache_creation_input_tokens", 0},
                                 {"cache_read_input_tokens", answer.cached_tokens},
                                 {"output_tokens", answer.completion_tokens()},
                                 {"reasoning_tokens", answer.reasoning_tokens()}});
  add_media_tokens(answer, usage);
  return usage;
}

JsonValue arguments_json(const AnswerCall& call) {
  return JsonValue::try_parse(call.arguments).value_or(JsonValue::object());
}

class MessagesFormat : public AnswerFormat {
 public:
  JsonValue body(Answer& answer) override {
    const AnswerChoice& choice = answer.choices.front();
    JsonValue content = JsonValue::array();
    for (const AnswerItem& item : choice.items) {
      if (item.kind == AnswerItem::Kind::kReasoning) {
        content.push_back(json_object(
            {{"type", "thinking"}, {"thinking", item.text}, {"signature", kSignature}}));
      } else if (item.kind == AnswerItem::Kind::kContent) {
        content.push_back(json_object({{"type", "text"}, {"text", item.text}}));
      } else {
        const AnswerCall& call = choice.calls[item.call];
        content.push_back(json_object({{"type", "tool_use"},
                                       {"id", call.id},
                                       {"name", call.name},
                                       {"input", arguments_json(call)}}));
      }
    }
    JsonValue message =
        head(answer, std::move(content), JsonValue::string(stop_reason(choice)),
             choice.stop_string.empty() ? JsonValue() : JsonValue::string(choice.stop_string));
    if (!choice.parse_error.empty())
      message.append_member("parse_error", JsonValue::string(choice.parse_error));
    return message;
  }

  std::string stream_begin(Answer& answer) override {
    return event("message_start",
                 {{"message", head(answer, JsonValue::array(), JsonValue(), JsonValue())}});
  }

  std::string stream_event(Answer& answer, int choice, const OutputEvent& e) override {
    using Kind = OutputEvent::Kind;
    std::string out;
    switch (e.kind) {
      case Kind::kReasoning:
        out = open(Block::kThinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
        return out += delta({{"type", "thinking_delta"}, {"thinking", e.text}});
      case Kind::kContent:
        out = open(Block::kText, {{"type", "text"}, {"text", ""}});
        return out += delta({{"type", "text_delta"}, {"text", e.text}});
      case Kind::kCallBegin: {
        const AnswerCall& call = answer.choices[choice].calls[e.call];
        out = close();  // two calls follow each other in blocks of the same kind
        return out += open(Block::kCall, {{"type", "tool_use"},
                                          {"id", call.id},
                                          {"name", call.name},
                                          {"input", JsonValue::object()}});
      }
      case Kind::kCallArguments:
        return delta({{"type", "input_json_delta"}, {"partial_json", e.text}});
      case Kind::kCallEnd:
        return close();
    }
    return {};
  }

  std::string stream_choice_end(Answer& answer, int choice) override { return close(); }

  std::string stream_end(Answer& answer) override {
    const AnswerChoice& choice = answer.choices.front();
    JsonValue change = json_object(
        {{"stop_reason", stop_reason(choice)},
         {"stop_sequence",
          choice.stop_string.empty() ? JsonValue() : JsonValue::string(choice.stop_string)}});
    if (!choice.parse_error.empty())
      change.append_member("parse_error", JsonValue::string(choice.parse_error));
    return event("message_delta", {{"delta", std::move(change)},
                                   {"usage", usage_json(answer)},
                                   {"timings", timings_json(answer)}}) +
           event("message_stop", {});
  }

  std::string stream_error(Answer& answer, const ApiError& error) override {
    return sse_event("error", error_json(ApiFamily::kAnthropic, error, answer.request_id));
  }
  std::string stream_ping() override { return event("ping", {}); }

 private:
  enum class Block : uint8_t { kNone, kThinking, kText, kCall };
  using Members = std::initializer_list<std::pair<const char*, JsonArg>>;

  static std::string event(const char* type, Members members) {
    JsonValue data = json_object({{"type", type}});
    for (const auto& [key, arg] : members) data.append_member(key, arg.value);
    return sse_event(type, data);
  }
  std::string delta(Members members) const {
    return event("content_block_delta", {{"index", index_}, {"delta", json_object(members)}});
  }
  // Closes the block of another kind that is open, if there is one.
  std::string open(Block kind, Members members) {
    if (open_ == kind) return {};
    std::string out = close();
    open_ = kind;
    return out + event("content_block_start",
                       {{"index", index_}, {"content_block", json_object(members)}});
  }
  std::string close() {
    if (open_ == Block::kNone) return {};
    std::string out;
    if (open_ == Block::kThinking)
      out = delta({{"type", "signature_delta"}, {"signature", kSignature}});
    open_ = Block::kNone;
    return out + event("content_block_stop", {{"index", index_++}});
  }
  static JsonValue head(const Answer& answer, JsonValue content, JsonValue stop_reason,
                        JsonValue stop_sequence) {
    return json_object({{"id", answer.id},
                        {"type", "message"},
                        {"role", "assistant"},
                        {"model", answer.model},
                        {"content", std::move(content)},
                        {"stop_reason", std::move(stop_reason)},
                        {"stop_sequence", std::move(stop_sequence)},
                        {"usage", usage_json(answer)},
                        {"thinking_mode", answer.thinking_mode}});
  }

  Block open_ = Block::kNone;
  int index_ = 0;  // of the open block, or of the next one
};

}  // namespace

std::unique_ptr<AnswerFormat> messages_format(const ApiRequest& request) {
  return std::make_unique<MessagesFormat>();
}

}  // namespace m3
