// The M3 chat protocol, writing side (model.md §15): messages and tools to the prompt, byte for
// byte as the official template renders them. Nothing is escaped; text that spells a marker is
// copied.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_value.h"

namespace m3 {

// Markers of the protocol; each is one added token of the tokenizer.
namespace chat_token {
inline constexpr std::string_view kConversationStart = "]~!b[";
inline constexpr std::string_view kRoleStart = "]~b]";
inline constexpr std::string_view kTurnEnd = "[e~[";  // the model's end of turn
inline constexpr std::string_view kNamespace =
    "]<]minimax[>[";  // precedes every tag of a tool call
inline constexpr std::string_view kThinkOpen = "<mm:think>";
inline constexpr std::string_view kThinkClose = "</mm:think>";
inline constexpr std::string_view kImage = "]<]image[>[";
inline constexpr std::string_view kVideo = "]<]video[>[";
inline constexpr std::string_view kMediaStart = "]<]start of image[>[";  // brackets videos too
inline constexpr std::string_view kMediaEnd = "]<]end of image[>[";
}  // namespace chat_token

struct ContentPart {
  enum class Type { kText, kImage, kVideo };
  Type type = Type::kText;
  std::string text;  // of kText

  static ContentPart of_text(std::string text) { return {Type::kText, std::move(text)}; }
  static ContentPart image() { return {Type::kImage, {}}; }
  static ContentPart video() { return {Type::kVideo, {}}; }
};

struct ToolCall {
  std::string name;
  JsonValue arguments = JsonValue::object();
};

// The `function` object of a tool as the client sent it: {"name": ..., "parameters": {schema}}.
struct Tool {
  JsonValue function = JsonValue::object();
  std::string name() const;
  const JsonValue* parameters() const;  // null pointer: none declared
};

struct Message {
  std::string role;  // root, system, developer, user, assistant or tool; others are skipped
  // No parts means no content. An empty text given as a part counts as content, an absent one does
  // not.
  std::vector<ContentPart> content;
  std::optional<std::string>
      reasoning;                     // assistant; absent: think tags are looked for in the content
  std::vector<ToolCall> tool_calls;  // assistant
};

struct RenderOptions {
  std::optional<std::string> thinking_mode;  // enabled, disabled, adaptive; absent is adaptive
  bool add_generation_prompt = true;
  std::optional<std::string> model_identity;  // developer block without a system message
};

// Throws Error for what the template refuses: a tool result without a call, arguments that are no
// object.
std::string render_chat(std::span<const Message> messages, std::span<const Tool> tools,
                        const RenderOptions& options);

// From the JSON of an OpenAI-like request. Parts of type image and video become media parts, others
// are ignored; convert image_url and the like before. Throws Error naming the place
// ("messages[2].content").
std::vector<Message> read_messages(const JsonValue& messages);
std::vector<Tool> read_tools(const JsonValue& tools);  // null: none

}  // namespace m3
