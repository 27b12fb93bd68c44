#include <fmt/core.h>

#include "server/chat_api.h"
#include "server/request_fields.h"

namespace m3 {

namespace {

// {type: image_url, image_url: {url, detail}}, or the URL itself in the place of the object.
ContentPart read_media_part(FieldReader& part, bool is_video, ConversationBuilder& builder) {
  const std::string key = is_video ? "video_url" : "image_url";
  const JsonValue* place = part.take(key);
  if (place == nullptr) refuse_field(part.path(key), "is missing, want {\"url\": ...}");
  if (place->is_string()) return builder.media_url(is_video, place->text(), 1, part.path(key));
  FieldReader inner(*place, part.path(key));
  const std::string url = inner.required_text("url");
  inner.accept({"detail"});  // M3 has one resolution rule
  double fps = 1;
  if (is_video) fps = inner.number("fps", 0.01, 120).value_or(1);
  inner.refuse_unknown();
  return builder.media_url(is_video, url, fps, inner.path("url"));
}

ContentPart read_part(const JsonValue& json, const std::string& where,
                      ConversationBuilder& builder) {
  FieldReader part(json, where);
  const std::string type = part.required_text("type");
  part.accept({"cache_control", "id", "annotations"});
  if (type == "text" || type == "refusal") return ContentPart::of_text(part.required_text(type));
  if (type == "image_url" || type == "video_url")
    return read_media_part(part, type == "video_url", builder);
  if (type == "file") {
    const JsonValue* file = part.object("file");
    if (file == nullptr) refuse_field(part.path("file"), "is missing, want {\"file_id\": ...}");
    FieldReader inner(*file, part.path("file"));
    const std::string id = inner.required_text("file_id");
    return builder.media_file(id, inner.path("file_id"));
  }
  refuse_field(part.path("type"),
               fmt::format("is '{}', want text, image_url, video_url or file", type.substr(0, 64)));
}

std::vector<ContentPart> read_content(FieldReader& fields, ConversationBuilder& builder) {
  std::vector<ContentPart> parts;
  const JsonValue* content = fields.take("content");
  if (content == nullptr) return parts;
  const std::string where = fields.path("content");
  if (content->is_string()) {
    if (!content->text().empty()) parts.push_back(ContentPart::of_text(content->text()));
    return parts;
  }
  if (!content->is_array()) {
    refuse_field(where, fmt::format("is of type {}, want a string or a list of parts",
                                    content->kind_name()));
  }
  for (size_t i = 0; i < content->size(); ++i) {
    parts.push_back(read_part(content->items()[i], fmt::format("{}[{}]", where, i), builder));
  }
  return parts;
}

void read_calls(FieldReader& fields, Message& message, ConversationBuilder& builder) {
  const JsonValue* calls = fields.array("tool_calls");
  if (calls == nullptr) return;
  for (size_t i = 0; i < calls->size(); ++i) {
    FieldReader call(calls->items()[i], fmt::format("{}[{}]", fields.path("tool_calls"), i));
    const JsonValue* function = call.object("function");
    if (function == nullptr)
      refuse_field(call.path("function"), "is missing, want {\"name\": ..., \"arguments\": ...}");
    FieldReader inner(*function, call.path("function"));
    message.tool_calls.push_back(builder.call(call.text("id").value_or(""),
                                              inner.required_text("name"), inner.take("arguments"),
                                              inner.path("arguments")));
  }
}

void read_message(const JsonValue& json, const std::string& where, ConversationBuilder& builder) {
  FieldReader fields(json, where);
  const auto role =
      fields.word("role", {"root", "system", "developer", "user", "assistant", "tool"});
  if (!role)
    refuse_field(fields.path("role"),
                 "is missing, want system, developer, user, assistant or tool");
  Message message{.role = *role};
  message.content = read_content(fields, builder);
  fields.accept({"name"});
  if (*role == "assistant") {
    auto reasoning = fields.text("reasoning_content"), other = fields.text("reasoning");
    if (reasoning && other && *reasoning != *other) {
      refuse_field(fields.path("reasoning"), "differs from reasoning_content; send one of them");
    }
    message.reasoning = reasoning ? reasoning : other;
    read_calls(fields, message, builder);
    fields.accept({"refusal", "annotations", "audio"});
    fields.not_built("function_call");
    if (message.content.empty() && message.tool_calls.empty() && !message.reasoning &&
        json.find("content") == nullptr) {
      refuse_field(fields.path("content"), "is missing, and there are no tool_calls");
    }
  } else if (json.find("content") == nullptr || json.find("content")->is_null()) {
    refuse_field(fields.path("content"), "is missing, want a string or a list of parts");
  }
  if (*role == "tool")
    builder.check_result_id(fields.text("tool_call_id").value_or(""), fields.path("tool_call_id"));
  builder.add(std::move(message), where);
}

void read_tools(FieldReader& fields, ConversationBuilder& builder) {
  const JsonValue* tools = fields.array("tools");
  if (tools == nullptr) return;
  for (size_t i = 0; i < tools->size(); ++i) {
    FieldReader tool(tools->items()[i], fmt::format("{}[{}]", fields.path("tools"), i));
    tool.word("type", {"function"});
    const JsonValue* function = tool.object("function");
    if (function == nullptr)
      refuse_field(tool.path("function"), "is missing, want {\"name\": ..., \"parameters\": ...}");
    builder.add_tool(*function, tool.path("function"));
  }
}

void read_tool_choice(FieldReader& fields, ApiRequest& request) {
  const JsonValue* choice = read_tool_choice_word(fields, request);
  if (choice == nullptr) return;
  FieldReader inner(*choice, fields.path("tool_choice"));
  inner.word("type", {"function"});
  const JsonValue* function = inner.object("function");
  if (function == nullptr) refuse_field(inner.path("function"), "is missing, want {\"name\": ...}");
  FieldReader name(*function, inner.path("function"));
  request.tool_choice = {ToolChoice::Kind::kNamed, name.required_text("name")};
}

void read_template_arguments(FieldReader& fields, ThinkingFields& thinking, ApiRequest& request) {
  const JsonValue* arguments = fields.object("chat_template_kwargs");
  if (arguments == nullptr) return;
  FieldReader inner(*arguments, fields.path("chat_template_kwargs"));
  thinking.read_modes(inner);
  request.model_identity = inner.text("model_identity");
  if (const auto add = inner.boolean("add_generation_prompt"); add && !*add) {
    refuse_field(inner.path("add_generation_prompt"), "must be true: an answer is generated");
  }
  inner.refuse_unknown();
}

}  // namespace

void read_chat_prompt(FieldReader& fields, const ModelInfo& info, ApiRequest& request) {
  ThinkingFields thinking;
  thinking.read_modes(fields);
  thinking.read_thinking_object(fields);
  if (const auto effort = fields.text("reasoning_effort"))
    thinking.set_effort(fields.path("reasoning_effort"), *effort);
  read_template_arguments(fields, thinking, request);
  request.thinking_mode = thinking.mode(info);

  ConversationBuilder builder(info, request);
  const JsonValue* messages = fields.array("messages");
  if (messages == nullptr) refuse_field(fields.path("messages"), "is missing, want a list");
  for (size_t i = 0; i < messages->size(); ++i)
    read_message(messages->items()[i], fmt::format("messages[{}]", i), builder);
  read_tools(fields, builder);
  read_tool_choice(fields, request);
  if (const JsonValue* format = fields.object("response_format")) {
    read_answer_form(*format, fields.path("response_format"), request);
  }
  read_structured_outputs(fields, request);
  builder.finish();
}

ApiRequest read_chat_request(const JsonValue& body, const ModelInfo& info) {
  ApiRequest request;
  FieldReader fields(body, "");
  read_common(fields, info, request);
  read_max_tokens(fields, {"max_completion_tokens", "max_tokens"}, request);
  read_stop(fields, "stop", request);
  read_chat_prompt(fields, info, request);
  request.logprobs = fields.boolean("logprobs").value_or(false);
  if (const auto top = fields.integer("top_logprobs", 0, 20)) {
    if (!request.logprobs && *top > 0) refuse_field("top_logprobs", "needs logprobs: true");
    request.top_logprobs = static_cast<int>(*top);
  }
  if (const JsonValue* options = fields.object("stream_options")) {
    if (!request.stream) refuse_field("stream_options", "needs stream: true");
    FieldReader inner(*options, "stream_options");
    request.include_usage = inner.boolean("include_usage").value_or(false);
    inner.accept({"include_obfuscation", "continuous_usage_stats"});
  }
  fields.accept({"store", "verbosity", "prediction"});
  fields.not_built("functions");
  fields.not_built("function_call", "none");
  fields.not_built("audio");
  fields.not_built("modalities");
  fields.not_built("web_search_options");
  fields.not_built("continue_final_message");
  for (std::string& path : fields.unknown()) request.ignored_fields.push_back(std::move(path));
  return request;
}

}  // namespace m3
