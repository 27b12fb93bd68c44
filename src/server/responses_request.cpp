#include <fmt/core.h>

#include <cmath>

#include "server/json_build.h"
#include "server/request_fields.h"
#include "server/responses_api.h"

namespace m3 {

namespace {

// The list of input items as turns: what one assistant turn consists of (reasoning, text, calls)
// comes as several items.
class InputReader {
 public:
  InputReader(ConversationBuilder& builder, std::optional<std::string> instructions)
      : builder_(builder) {
    if (!instructions) return;
    system_ = {.role = "system", .content = {ContentPart::of_text(*std::move(instructions))}};
    system_where_ = "instructions";
  }

  void item(const JsonValue& json, const std::string& where) {
    FieldReader fields(json, where);
    const std::string type = fields.text("type").value_or("message");
    fields.accept({"id", "status"});
    if (type == "message") {
      message(fields, where);
    } else if (type == "function_call") {
      assistant(where).tool_calls.push_back(
          builder_.call(fields.required_text("call_id"), fields.required_text("name"),
                        fields.take("arguments"), fields.path("arguments")));
    } else if (type == "function_call_output") {
      end_assistant();
      builder_.check_result_id(fields.required_text("call_id"), fields.path("call_id"));
      Message result{.role = "tool", .content = content(fields, "output")};
      if (result.content.empty()) result.content.push_back(ContentPart::of_text(""));
      add(std::move(result), where);
    } else if (type == "reasoning") {
      std::string text;
      for (const char* key : {"content", "summary"}) {
        const JsonValue* parts = fields.array(key);
        if (parts == nullptr || !text.empty()) continue;
        for (size_t i = 0; i < parts->size(); ++i) {
          FieldReader part(parts->items()[i], fmt::format("{}[{}]", fields.path(key), i));
          text += part.text("text").value_or("");
        }
      }
      Message& turn = assistant(where);
      if (!text.empty()) turn.reasoning = turn.reasoning.value_or("") + text;
    } else {
      refuse_field(
          fields.path("type"),
          fmt::format("is '{}', want message, function_call, function_call_output or reasoning",
                      type.substr(0, 64)));
    }
  }

  void text(const std::string& text) {
    Message message{.role = "user"};
    if (!text.empty()) message.content.push_back(ContentPart::of_text(text));
    add(std::move(message), "input");
  }

  void finish() {
    end_assistant();
    end_system();
  }

 private:
  void message(FieldReader& fields, const std::string& where) {
    const auto role = fields.word("role", {"user", "assistant", "system", "developer"});
    if (!role)
      refuse_field(fields.path("role"), "is missing, want user, assistant, system or developer");
    std::vector<ContentPart> parts = content(fields, "content");
    if (*role == "assistant") {
      Message& turn = assistant(where);
      turn.content.insert(turn.content.end(), parts.begin(), parts.end());
      return;
    }
    end_assistant();
    const bool joins = *role != "user" && system_;
    if (joins) {  // the instructions, and a developer message at the head of the input: M3 has one
                  // block for both
      system_->content.push_back(ContentPart::of_text("\n\n"));
      system_->content.insert(system_->content.end(), parts.begin(), parts.end());
      end_system();
      return;
    }
    add({.role = *role, .content = std::move(parts)}, where);
  }

  std::vector<ContentPart> content(FieldReader& fields, const char* key) {
    std::vector<ContentPart> parts;
    const JsonValue* content = fields.take(key);
    const std::string where = fields.path(key);
    if (content == nullptr) refuse_field(where, "is missing, want a string or a list of parts");
    if (content->is_string()) {
      if (!content->text().empty()) parts.push_back(ContentPart::of_text(content->text()));
      return parts;
    }
    if (!content->is_array())
      refuse_field(where, fmt::format("is of type {}, want a string or a list of parts",
                                      content->kind_name()));
    for (size_t i = 0; i < content->size(); ++i)
      parts.push_back(part(content->items()[i], fmt::format("{}[{}]", where, i)));
    return parts;
  }

  ContentPart part(const JsonValue& json, const std::string& where) {
    FieldReader fields(json, where);
    const std::string type = fields.required_text("type");
    if (type == "input_text" || type == "output_text" || type == "text")
      return ContentPart::of_text(fields.required_text("text"));
    if (type == "refusal") return ContentPart::of_text(fields.required_text("refusal"));
    if (type == "input_image" || type == "input_file") {
      fields.accept({"detail", "filename"});
      if (const auto id = fields.text("file_id"))
        return builder_.media_file(*id, fields.path("file_id"));
      const char* key = type == "input_image" ? "image_url" : "file_data";
      return builder_.media_url(type == "input_file", fields.required_text(key), 1,
                                fields.path(key));
    }
    refuse_field(fields.path("type"),
                 fmt::format("is '{}', want input_text, output_text, input_image or input_file",
                             type.substr(0, 64)));
  }

  Message& assistant(const std::string& where) {
    if (!assistant_) {
      assistant_ = {.role = "assistant"};
      assistant_where_ = where;
    }
    return *assistant_;
  }
  void end_assistant() {
    if (assistant_) add(std::move(*assistant_), assistant_where_);
    assistant_.reset();
  }
  void end_system() {
    if (system_) builder_.add(std::move(*system_), system_where_);
    system_.reset();
  }
  void add(Message message, const std::string& where) {
    end_system();
    builder_.add(std::move(message), where);
  }

  ConversationBuilder& builder_;
  std::optional<Message> system_, assistant_;
  std::string system_where_, assistant_where_;
};

void read_tools(FieldReader& fields, ConversationBuilder& builder) {
  const JsonValue* tools = fields.array("tools");
  if (tools == nullptr) return;
  for (size_t i = 0; i < tools->size(); ++i) {
    const std::string where = fmt::format("tools[{}]", i);
    FieldReader tool(tools->items()[i], where);
    const std::string type = tool.required_text("type");
    if (type != "function") {
      refuse_field(tool.path("type"),
                   fmt::format("'{}' is a tool of the hosted service; only functions work here",
                               type.substr(0, 64)));
    }
    JsonValue function = JsonValue::object();
    function.append_member("name", JsonValue::string(tool.required_text("name")));
    if (auto text = tool.text("description"))
      function.append_member("description", JsonValue::string(*std::move(text)));
    if (const JsonValue* schema = tool.object("parameters"))
      function.append_member("parameters", *schema);
    if (const auto strict = tool.boolean("strict"); strict && *strict)
      function.append_member("strict", JsonValue::boolean(true));
    builder.add_tool(function, where);
  }
}

void read_tool_choice(FieldReader& fields, ApiRequest& request) {
  const JsonValue* choice = read_tool_choice_word(fields, request);
  if (choice == nullptr) return;
  FieldReader inner(*choice, "tool_choice");
  inner.word("type", {"function"});
  request.tool_choice = {ToolChoice::Kind::kNamed, inner.required_text("name")};
}

double short_number(float value) {
  return std::round(static_cast<double>(value) * 1e6) / 1e6;
}  // 0.95, not 0.949999988

// Repeated in every answer, as the official service does.
JsonValue echo_fields(const JsonValue& body, const ApiRequest& request) {
  const auto or_default = [&](const char* key, JsonValue other) {
    const JsonValue* value = body.find(key);
    return value == nullptr || value->is_null() ? other : *value;
  };
  JsonValue reasoning = or_default("reasoning", JsonValue::object());
  for (const char* key : {"effort", "summary"}) {
    if (reasoning.find(key) == nullptr) reasoning.append_member(key, JsonValue());
  }
  return json_object(
      {{"instructions", or_default("instructions", JsonValue())},
       {"max_output_tokens", or_default("max_output_tokens", JsonValue())},
       {"metadata", or_default("metadata", JsonValue::object())},
       {"parallel_tool_calls", request.parallel_tool_calls},
       {"previous_response_id", nullptr},
       {"reasoning", std::move(reasoning)},
       {"store", false},
       {"temperature", short_number(request.sampling.temperature)},
       {"text", or_default("text", json_object({{"format", json_object({{"type", "text"}})}}))},
       {"tool_choice", or_default("tool_choice", JsonValue::string("auto"))},
       {"tools", or_default("tools", JsonValue::array())},
       {"top_p", short_number(request.sampling.top_p)},
       {"truncation", "disabled"},
       {"background", false}});
}

}  // namespace

ApiRequest read_responses_request(const JsonValue& body, const ModelInfo& info) {
  ApiRequest request;
  FieldReader fields(body, "");
  read_common(fields, info, request);
  read_max_tokens(fields, {"max_output_tokens"}, request);
  if (request.n != 1) refuse_field("n", "must be 1 here");

  ThinkingFields thinking;
  thinking.read_modes(fields);
  if (const JsonValue* reasoning = fields.object("reasoning")) {
    FieldReader inner(*reasoning, "reasoning");
    if (const auto effort = inner.text("effort"))
      thinking.set_effort(inner.path("effort"), *effort);
    inner.accept({"summary", "generate_summary"});
    inner.refuse_unknown();
  }
  request.thinking_mode = thinking.mode(info);
  if (const JsonValue* text = fields.object("text")) {
    FieldReader inner(*text, "text");
    if (const JsonValue* format = inner.object("format"))
      read_answer_form(*format, "text.format", request);
    inner.accept({"verbosity"});
    inner.refuse_unknown();
  }

  ConversationBuilder builder(info, request);
  InputReader input(builder, fields.text("instructions"));
  const JsonValue* items = fields.take("input");
  if (items == nullptr) refuse_field("input", "is missing, want a string or a list of items");
  if (items->is_string()) {
    input.text(items->text());
  } else if (items->is_array()) {
    for (size_t i = 0; i < items->size(); ++i)
      input.item(items->items()[i], fmt::format("input[{}]", i));
  } else {
    refuse_field("input", fmt::format("is of type {}, want a string or a list of items",
                                      items->kind_name()));
  }
  input.finish();
  read_tools(fields, builder);
  read_tool_choice(fields, request);
  builder.finish();

  fields.not_built("store");
  fields.not_built("previous_response_id");
  fields.not_built("conversation");
  fields.not_built("background");
  fields.not_built("prompt");
  fields.not_built("max_tool_calls");
  fields.not_built("top_logprobs");
  fields.not_built("context_management");
  fields.not_built("truncation", "disabled");
  fields.accept({"stream_options", "include"});
  for (std::string& path : fields.unknown()) request.ignored_fields.push_back(std::move(path));
  request.echo_fields = echo_fields(body, request);
  return request;
}

}  // namespace m3
