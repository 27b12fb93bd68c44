#include <fmt/core.h>

#include "server/messages_api.h"
#include "server/request_fields.h"

namespace m3 {

namespace {

// One block of a message becomes part of a turn, a call, a result or reasoning.
class MessageReader {
 public:
  MessageReader(ConversationBuilder& builder, std::string role, std::string where)
      : builder_(builder), where_(std::move(where)), message_{.role = std::move(role)} {}

  void block(const JsonValue& json, const std::string& where) {
    FieldReader fields(json, where);
    const std::string type = fields.required_text("type");
    fields.accept({"cache_control", "citations"});
    const bool is_user = message_.role != "assistant";
    if (type == "text") {
      message_.content.push_back(ContentPart::of_text(fields.required_text("text")));
    } else if ((type == "image" || type == "video") && is_user) {
      message_.content.push_back(media(fields, type == "video"));
    } else if (type == "tool_result" && is_user) {
      result(fields);
    } else if (type == "tool_use" && !is_user) {
      message_.tool_calls.push_back(builder_.call(fields.required_text("id"),
                                                  fields.required_text("name"),
                                                  fields.object("input"), fields.path("input")));
    } else if (type == "thinking" && !is_user) {
      fields.accept({"signature"});
      message_.reasoning = message_.reasoning.value_or("") + fields.required_text("thinking");
    } else if (type == "redacted_thinking" && !is_user) {
      // Nothing of ours: there is no text in it.
    } else {
      refuse_field(fields.path("type"), fmt::format("is '{}', want {}", type.substr(0, 64),
                                                    is_user ? "text, image, video or tool_result"
                                                            : "text, thinking or tool_use"));
    }
  }

  void text(const std::string& text) {
    if (!text.empty()) message_.content.push_back(ContentPart::of_text(text));
  }

  void finish() {
    const bool empty =
        message_.content.empty() && message_.tool_calls.empty() && !message_.reasoning;
    if (!empty || !had_result_) builder_.add(std::move(message_), where_);
  }

 private:
  ContentPart media(FieldReader& fields, bool is_video) {
    const JsonValue* source = fields.object("source");
    if (source == nullptr)
      refuse_field(fields.path("source"), "is missing, want {\"type\": \"base64\", ...}");
    FieldReader inner(*source, fields.path("source"));
    const auto type = inner.word("type", {"base64", "url", "file"});
    if (!type) refuse_field(inner.path("type"), "is missing, want 'base64', 'url' or 'file'");
    inner.accept({"media_type"});  // the first bytes decide
    if (*type == "url")
      return builder_.media_url(is_video, inner.required_text("url"), 1, inner.path("url"));
    if (*type == "file")
      return builder_.media_file(inner.required_text("file_id"), inner.path("file_id"));
    const std::string data = inner.required_text("data");
    if (data.size() / 4 * 3 > kMaxMediaBytes) {
      refuse_field(inner.path("data"), fmt::format("has {} bytes of base64, want at most {} bytes",
                                                   data.size(), kMaxMediaBytes));
    }
    return builder_.media(is_video, decode_base64(data, inner.path("data")), 1, inner.path("data"));
  }

  // A result is a turn of its own in M3; what stood before it in the message comes first.
  void result(FieldReader& fields) {
    builder_.check_result_id(fields.required_text("tool_use_id"), fields.path("tool_use_id"));
    fields.accept({"is_error"});
    if (!message_.content.empty()) {
      builder_.add(std::move(message_), where_);
      message_ = {.role = "user"};
    }
    MessageReader inner(builder_, "tool", where_);
    const JsonValue* content = fields.take("content");
    if (content != nullptr && content->is_string()) {
      inner.message_.content.push_back(ContentPart::of_text(content->text()));
    } else if (content != nullptr && content->is_array()) {
      for (size_t i = 0; i < content->size(); ++i) {
        inner.block(content->items()[i], fmt::format("{}[{}]", fields.path("content"), i));
      }
    } else if (content != nullptr) {
      refuse_field(
          fields.path("content"),
          fmt::format("is of type {}, want a string or a list of blocks", content->kind_name()));
    }
    if (inner.message_.content.empty()) inner.message_.content.push_back(ContentPart::of_text(""));
    inner.finish();
    had_result_ = true;
  }

  ConversationBuilder& builder_;
  const std::string where_;
  Message message_;
  bool had_result_ = false;
};

void read_turn(const std::string& role, const JsonValue* content, const std::string& where,
               const std::string& content_where, ConversationBuilder& builder) {
  MessageReader reader(builder, role, where);
  if (content == nullptr)
    refuse_field(content_where, "is missing, want a string or a list of blocks");
  if (content->is_string()) {
    reader.text(content->text());
  } else if (content->is_array()) {
    for (size_t i = 0; i < content->size(); ++i)
      reader.block(content->items()[i], fmt::format("{}[{}]", content_where, i));
  } else {
    refuse_field(content_where, fmt::format("is of type {}, want a string or a list of blocks",
                                            content->kind_name()));
  }
  reader.finish();
}

void read_tools(FieldReader& fields, ConversationBuilder& builder) {
  const JsonValue* tools = fields.array("tools");
  if (tools == nullptr) return;
  for (size_t i = 0; i < tools->size(); ++i) {
    FieldReader tool(tools->items()[i], fmt::format("tools[{}]", i));
    const std::string type = tool.text("type").value_or("custom");
    if (type != "custom") {
      refuse_field(tool.path("type"),
                   fmt::format("'{}' is a tool of the hosted service; only custom tools work here",
                               type.substr(0, 64)));
    }
    JsonValue function = JsonValue::object();
    function.append_member("name", JsonValue::string(tool.required_text("name")));
    if (auto text = tool.text("description"))
      function.append_member("description", JsonValue::string(*std::move(text)));
    if (const JsonValue* schema = tool.take("input_schema"))
      function.append_member("parameters", *schema);
    if (const auto strict = tool.boolean("strict"))
      function.append_member("strict", JsonValue::boolean(*strict));
    builder.add_tool(function,
                     tool.path("input_schema").substr(0, tool.path("input_schema").rfind('.')));
  }
}

void read_tool_choice(FieldReader& fields, ApiRequest& request) {
  const JsonValue* choice = fields.object("tool_choice");
  if (choice == nullptr) return;
  FieldReader inner(*choice, "tool_choice");
  const auto type = inner.word("type", {"auto", "any", "tool", "none"});
  if (!type) refuse_field("tool_choice.type", "is missing, want 'auto', 'any', 'tool' or 'none'");
  using Kind = ToolChoice::Kind;
  request.tool_choice.kind = *type == "auto"   ? Kind::kAuto
                             : *type == "any"  ? Kind::kRequired
                             : *type == "tool" ? Kind::kNamed
                                               : Kind::kNone;
  if (*type == "tool") request.tool_choice.name = inner.required_text("name");
  request.parallel_tool_calls = !inner.boolean("disable_parallel_tool_use").value_or(false);
}

void read_output_config(FieldReader& fields, ThinkingFields& thinking, ApiRequest& request) {
  if (const JsonValue* format = fields.object("output_format"))
    read_answer_form(*format, "output_format", request);
  const JsonValue* config = fields.object("output_config");
  if (config == nullptr) return;
  FieldReader inner(*config, "output_config");
  if (const auto effort = inner.text("effort")) thinking.set_effort(inner.path("effort"), *effort);
  if (const JsonValue* format = inner.object("format"))
    read_answer_form(*format, inner.path("format"), request);
  inner.refuse_unknown();
}

}  // namespace

ApiRequest read_messages_request(const JsonValue& body, const ModelInfo& info) {
  ApiRequest request;
  FieldReader fields(body, "");
  read_common(fields, info, request);
  read_max_tokens(fields, {"max_tokens"}, request);
  read_stop(fields, "stop_sequences", request);

  ThinkingFields thinking;
  thinking.read_modes(fields);
  thinking.read_thinking_object(fields);
  read_output_config(fields, thinking, request);
  request.thinking_mode = thinking.mode(info);

  ConversationBuilder builder(info, request);
  if (const JsonValue* system = fields.take("system"))
    read_turn("system", system, "system", "system", builder);
  const JsonValue* messages = fields.array("messages");
  if (messages == nullptr) refuse_field("messages", "is missing, want a list");
  for (size_t i = 0; i < messages->size(); ++i) {
    const std::string where = fmt::format("messages[{}]", i);
    FieldReader message(messages->items()[i], where);
    const auto role = message.word("role", {"user", "assistant", "system"});
    if (!role) refuse_field(message.path("role"), "is missing, want 'user' or 'assistant'");
    read_turn(*role, message.take("content"), where, message.path("content"), builder);
  }
  read_tools(fields, builder);
  read_tool_choice(fields, request);
  fields.not_built("container");
  fields.not_built("mcp_servers");
  builder.finish();
  for (std::string& path : fields.unknown()) request.ignored_fields.push_back(std::move(path));
  return request;
}

}  // namespace m3
