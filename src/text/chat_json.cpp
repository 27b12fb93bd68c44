// Messages and tools from the JSON of a request. Shapes that the official template would print as a
// Python object are refused; scalars are accepted as it prints them.
#include "base/check.h"
#include "text/chat.h"

namespace m3 {

namespace {

// str(value) of Python for scalars.
std::string python_text(const JsonValue& value, const std::string& where) {
  if (value.is_null()) return "None";
  if (value.is_bool()) return value.as_bool() ? "True" : "False";
  M3_CHECK(value.is_string() || value.is_number(), "{} is of type {}, want a text", where,
           value.kind_name());
  return value.text();
}

std::string member_text(const JsonValue& part, std::string_view key, const std::string& where) {
  const JsonValue* value = part.find(key);
  return value == nullptr ? "" : python_text(*value, fmt::format("{}.{}", where, key));
}

bool is_word(const JsonValue* value, std::string_view word) {
  return value != nullptr && value->is_string() && value->text() == word;
}

ContentPart read_part(const JsonValue& part, bool is_tool_result, const std::string& where) {
  if (part.is_string()) return ContentPart::of_text(part.text());
  const JsonValue* type = part.find("type");
  if (is_word(type, "image")) return ContentPart::image();
  if (is_word(type, "video")) return ContentPart::video();
  if (is_tool_result && part.find("output") != nullptr)
    return ContentPart::of_text(member_text(part, "output", where));
  if (is_word(type, "text")) return ContentPart::of_text(member_text(part, "text", where));
  if (!is_tool_result)
    return ContentPart::of_text("");  // other types are ignored, but the list is not empty
  return ContentPart::of_text(python_text(part, where));
}

std::vector<ContentPart> read_content(const JsonValue* content, bool is_tool_result,
                                      const std::string& where) {
  std::vector<ContentPart> parts;
  if (content == nullptr) return parts;
  M3_CHECK(!is_tool_result || content->is_string() || content->is_array(),
           "{} of a tool result is of type {}, want a string or a list of parts", where,
           content->kind_name());
  if (content->is_array()) {
    for (size_t i = 0; i < content->size(); ++i) {
      parts.push_back(
          read_part(content->items()[i], is_tool_result, fmt::format("{}[{}]", where, i)));
    }
  } else if (!content->is_null()) {
    std::string text = python_text(*content, where);
    if (!text.empty()) parts.push_back(ContentPart::of_text(std::move(text)));
  }
  return parts;
}

ToolCall read_call(const JsonValue& call, const std::string& where) {
  M3_CHECK(call.is_object(), "{} is of type {}, want an object", where, call.kind_name());
  const JsonValue* function = call.find("function");
  const JsonValue& body = function != nullptr && function->is_object() ? *function : call;
  const JsonValue* name = body.find("name");
  M3_CHECK(name != nullptr && name->is_string(), "{} has no name (a string)", where);
  const JsonValue* arguments = body.find("arguments");
  M3_CHECK(arguments != nullptr, "{} ('{}') has no arguments", where, name->text());
  M3_CHECK(arguments->is_object(),
           "{} ('{}'): arguments are of type {}, want an object; parse JSON text before", where,
           name->text(), arguments->kind_name());
  return {name->text(), *arguments};
}

Message read_message(const JsonValue& json, const std::string& where) {
  M3_CHECK(json.is_object(), "{} is of type {}, want an object", where, json.kind_name());
  Message message;
  if (const JsonValue* role = json.find("role"); role != nullptr && role->is_string())
    message.role = role->text();
  constexpr std::string_view kRoles[] = {"root", "system",    "developer",
                                         "user", "assistant", "tool"};
  bool known = false;
  for (std::string_view role : kRoles) known = known || message.role == role;
  if (!known) return message;  // skipped by the renderer, whatever it holds

  message.content = read_content(json.find("content"), message.role == "tool", where + ".content");
  if (message.role != "assistant") return message;
  if (const JsonValue* reasoning = json.find("reasoning_content");
      reasoning != nullptr && reasoning->is_string()) {
    message.reasoning = reasoning->text();
  }
  if (const JsonValue* calls = json.find("tool_calls"); calls != nullptr && !calls->is_null()) {
    M3_CHECK(calls->is_array(), "{}.tool_calls is of type {}, want a list", where,
             calls->kind_name());
    for (size_t i = 0; i < calls->size(); ++i) {
      message.tool_calls.push_back(
          read_call(calls->items()[i], fmt::format("{}.tool_calls[{}]", where, i)));
    }
  }
  return message;
}

}  // namespace

std::vector<Message> read_messages(const JsonValue& messages) {
  M3_CHECK(messages.is_array(), "messages is of type {}, want a list", messages.kind_name());
  std::vector<Message> out;
  for (size_t i = 0; i < messages.size(); ++i) {
    out.push_back(read_message(messages.items()[i], fmt::format("messages[{}]", i)));
  }
  return out;
}

std::vector<Tool> read_tools(const JsonValue& tools) {
  std::vector<Tool> out;
  if (tools.is_null()) return out;
  M3_CHECK(tools.is_array(), "tools is of type {}, want a list", tools.kind_name());
  for (size_t i = 0; i < tools.size(); ++i) {
    const JsonValue* function = tools.items()[i].find("function");
    M3_CHECK(
        function != nullptr && function->is_object(),
        "tools[{}] has no object 'function' ({{\"type\": \"function\", \"function\": {{...}}}})",
        i);
    out.push_back({*function});
  }
  return out;
}

}  // namespace m3
