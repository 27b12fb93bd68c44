#include "text/chat.h"

#include "base/check.h"

namespace m3 {

namespace {

using namespace chat_token;

constexpr std::string_view kDefaultRoot =
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. "
    "Founded in early 2022, "
    "MiniMax is a global AI foundation model company committed to advancing the frontiers of AI "
    "towards AGI.";
constexpr std::string_view kDefaultDeveloper = "You are a helpful assistant.";
constexpr std::string_view kThinkingInstructions =
    "You have a thinking capability that allows you to reason step by step before responding. When "
    "thinking is enabled, "
    "wrap your reasoning in <mm:think></mm:think> tags before your response. When thinking is "
    "disabled, begin your "
    "response directly after the </mm:think> prefix. When thinking is adaptive, decide on your own "
    "whether to think for "
    "the current turn.\n";
constexpr std::string_view kModeEnabled =
    "Current thinking mode: enabled. You MUST think step by step before every response, including "
    "after receiving "
    "function/tool results.\n";
constexpr std::string_view kModeDisabled =
    "Current thinking mode: disabled. Do not output any thinking process.\n";
constexpr std::string_view kModeAdaptive =
    "Current thinking mode: adaptive. You are encouraged to think for complex decision-making, "
    "multi-step reasoning, or "
    "when analyzing function/tool results.\n";

// Texts around the list of tools; "{NS}" stands for the namespace token.
constexpr std::string_view kToolsHead =
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\nHere are the "
    "tools available in "
    "JSONSchema format:\n\n<tools>\n";
constexpr std::string_view kToolsTail =
    "</tools>\n\nTo call tools, wrap all invocations in a single {NS}<tool_call>{NS}</tool_call> "
    "block. Parameter values "
    "containing nested objects or arrays are recursively expanded into XML elements. "
    "Example:\n\n{NS}<tool_call>\n"
    "{NS}<invoke "
    "name=\"tool-name-1\">{NS}<param-1>value-1{NS}</param-1>{NS}<param-2>{NS}<item>{NS}<key-a>val-a"
    "{NS}</key-a>{NS}<key-b>val-b{NS}</key-b>{NS}</item>{NS}</param-2>{NS}</invoke>\n"
    "{NS}<invoke "
    "name=\"tool-name-2\">{NS}<param-1>value-1{NS}</param-1>{NS}</invoke>\n{NS}</tool_call>";

std::string with_namespace(std::string_view text) {
  constexpr std::string_view kMark = "{NS}";
  std::string out;
  size_t at = 0;
  for (size_t next; (next = text.find(kMark, at)) != text.npos; at = next + kMark.size()) {
    out += text.substr(at, next - at);
    out += kNamespace;
  }
  out += text.substr(at);
  return out;
}

std::string content_text(const std::vector<ContentPart>& parts) {
  std::string out;
  for (const ContentPart& part : parts) {
    switch (part.type) {
      case ContentPart::Type::kText:
        out += part.text;
        break;
      case ContentPart::Type::kImage:
        out += kImage;
        break;
      case ContentPart::Type::kVideo:
        out += kVideo;
        break;
    }
  }
  return out;
}

std::string_view strip_line_breaks(std::string_view text) {
  const size_t first = text.find_first_not_of('\n');
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of('\n') - first + 1);
}

bool is_developer(const Message& message) {
  return message.role == "system" || message.role == "developer";
}

class Renderer {
 public:
  explicit Renderer(std::span<const Message> messages) : messages_(messages) {}

  std::string render(std::span<const Tool> tools, const RenderOptions& options) {
    write_system_block(options);
    write_developer_block(tools, options);
    for (idx_ = 0; idx_ < messages_.size(); ++idx_) write_turn(messages_[idx_]);
    if (options.add_generation_prompt) {
      open("ai");
      if (options.thinking_mode == "enabled") out_ += kThinkOpen;
      if (options.thinking_mode == "disabled") out_ += kThinkClose;
    }
    return std::move(out_);
  }

 private:
  void open(std::string_view role) {
    out_ += kRoleStart;
    out_ += role;
    out_ += '\n';
  }
  void close() {
    out_ += kTurnEnd;
    out_ += '\n';
  }
  void tag(std::string_view before, std::string_view name) {
    out_ += kNamespace;
    out_ += before;
    out_ += name;
    out_ += '>';
  }

  bool has_root() const { return !messages_.empty() && messages_[0].role == "root"; }

  void write_system_block(const RenderOptions& options) {
    out_ += kConversationStart;
    open("system");
    if (has_root() && !messages_[0].content.empty()) {
      out_ += content_text(messages_[0].content);
    } else {
      out_ += kDefaultRoot;
    }
    out_ += "\n\n<thinking_instructions>\n";
    out_ += kThinkingInstructions;
    const std::string mode = options.thinking_mode.value_or("adaptive");
    if (mode == "enabled") out_ += kModeEnabled;
    if (mode == "disabled") out_ += kModeDisabled;
    if (mode == "adaptive") out_ += kModeAdaptive;
    out_ += "</thinking_instructions>";
    close();
  }

  void write_developer_block(std::span<const Tool> tools, const RenderOptions& options) {
    open("developer");
    const size_t place = has_root() ? 1 : 0;
    if (place < messages_.size() && is_developer(messages_[place]) &&
        !messages_[place].content.empty()) {
      out_ += content_text(messages_[place].content);
    } else if (options.model_identity) {
      out_ += *options.model_identity;
    } else {
      out_ += kDefaultDeveloper;
    }
    if (!tools.empty()) {
      out_ += kToolsHead;
      for (const Tool& tool : tools) {
        out_ += "<tool>";
        out_ += tool.function.dump_python();
        out_ += "</tool>\n";
      }
      out_ += with_namespace(kToolsTail);
    }
    close();
  }

  void write_turn(const Message& message) {
    if (message.role == "user") {
      open("user");
      out_ += content_text(message.content);
      close();
    } else if (message.role == "assistant") {
      write_assistant(message);
    } else if (message.role == "tool") {
      write_tool_result(message);
    }
  }

  void write_assistant(const Message& message) {
    open("ai");
    std::string content = content_text(message.content);
    std::string reasoning = message.reasoning.value_or("");
    if (!message.reasoning) {
      const size_t first_close = content.find(kThinkClose);
      if (first_close != content.npos) {
        std::string_view before = std::string_view(content).substr(0, first_close);
        const size_t last_open = before.rfind(kThinkOpen);
        if (last_open != before.npos) before = before.substr(last_open + kThinkOpen.size());
        reasoning = strip_line_breaks(before);
        content = strip_line_breaks(
            std::string_view(content).substr(content.rfind(kThinkClose) + kThinkClose.size()));
      }
    }
    if (!reasoning.empty()) {
      out_ += kThinkOpen;
      out_ += reasoning;
    }
    out_ += kThinkClose;
    out_ += content;
    write_calls(message.tool_calls);
    last_assistant_called_ = !message.tool_calls.empty();
    close();
  }

  void write_calls(const std::vector<ToolCall>& calls) {
    if (calls.empty()) return;
    tag("<", "tool_call");
    out_ += '\n';
    for (const ToolCall& call : calls) {
      M3_CHECK(call.arguments.is_object(),
               "messages[{}]: arguments of the call of '{}' are of type {}, want an object", idx_,
               call.name, call.arguments.kind_name());
      tag("<invoke name=\"", call.name + "\"");
      write_members(call.arguments);
      tag("</", "invoke");
      out_ += '\n';
    }
    tag("</", "tool_call");
  }

  void write_members(const JsonValue& object) {
    for (size_t i = 0; i < object.size(); ++i) {
      if (object.items()[i].is_null()) continue;
      write_element(object.keys()[i], object.items()[i]);
    }
  }

  void write_element(std::string_view name, const JsonValue& value) {
    tag("<", name);
    if (value.is_object()) {
      write_members(value);
    } else if (value.is_array()) {
      for (const JsonValue& item : value.items()) write_element("item", item);
    } else if (value.is_bool()) {
      out_ += value.as_bool() ? "true" : "false";
    } else {
      out_ += value.text();  // of null: nothing
    }
    tag("</", name);
  }

  // Consecutive results share one turn; a skipped message between two of them ends it.
  void write_tool_result(const Message& message) {
    M3_CHECK(last_assistant_called_,
             "messages[{}] is a tool result, but the assistant turn before it has no tool call (or "
             "there is none)",
             idx_);
    if (idx_ == 0 || messages_[idx_ - 1].role != "tool") {
      out_ += kRoleStart;
      out_ += "tool";
    }
    out_ += "\n<response>";
    out_ += content_text(message.content);
    out_ += "</response>";
    if (idx_ + 1 == messages_.size() || messages_[idx_ + 1].role != "tool") close();
  }

  std::span<const Message> messages_;
  std::string out_;
  size_t idx_ = 0;
  bool last_assistant_called_ = false;
};

}  // namespace

std::string Tool::name() const {
  const JsonValue* value = function.find("name");
  return value != nullptr && value->is_string() ? value->text() : "";
}

const JsonValue* Tool::parameters() const {
  const JsonValue* value = function.find("parameters");
  return value != nullptr && value->is_object() ? value : nullptr;
}

std::string render_chat(std::span<const Message> messages, std::span<const Tool> tools,
                        const RenderOptions& options) {
  return Renderer(messages).render(tools, options);
}

}  // namespace m3
