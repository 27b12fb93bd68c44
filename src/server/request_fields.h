// Fields that mean the same in several API families.
#pragma once
#include <set>
#include <string>

#include "server/api_request.h"
#include "server/field_reader.h"

namespace m3 {

inline constexpr int kMaxJsonDepth = 64;
inline constexpr size_t kMaxMessages = 65'536, kMaxTools = 1'024, kMaxToolBytes = 256 << 10,
                        kMaxMedia = 64;
inline constexpr size_t kMaxMediaBytes = size_t{64} << 20;

// All spellings of the thinking option; two that contradict are an error that names both
// (serving.md §4).
class ThinkingFields {
 public:
  void set(const std::string& path, const std::string& mode);
  void set_effort(const std::string& path, const std::string& effort);
  // thinking_mode and enable_thinking, at the top or inside of chat_template_kwargs.
  void read_modes(FieldReader& fields);
  void read_thinking_object(FieldReader& fields);  // thinking: {type, ...}
  std::string mode(const ModelInfo& info) const {
    return mode_.empty() ? info.default_thinking : mode_;
  }

 private:
  std::string mode_, path_;
};

// model, stream, temperature, penalties, seed, stop, logit_bias and so on, with the model's
// defaults.
void read_common(FieldReader& fields, const ModelInfo& info, ApiRequest& request);
// The length limit under any of the names given.
void read_max_tokens(FieldReader& fields, std::initializer_list<std::string_view> keys,
                     ApiRequest& request);
void read_stop(FieldReader& fields, std::string_view key, ApiRequest& request);
// parallel_tool_calls and tool_choice. A choice that names a tool is returned: each family spells it its own way.
const JsonValue* read_tool_choice_word(FieldReader& fields, ApiRequest& request);
void read_structured_outputs(FieldReader& fields, ApiRequest& request);  // {json, regex, choice}
// {"type": "json_schema", ...} of chat (schema inside of json_schema) and responses (schema beside
// the type).
void read_answer_form(const JsonValue& format, const std::string& path, ApiRequest& request);

// Builds the messages of a conversation and checks what every family asks of them.
class ConversationBuilder {
 public:
  ConversationBuilder(const ModelInfo& info, ApiRequest& request)
      : info_(info), request_(request) {}

  // `where` names the message, for complaints.
  void add(Message message, const std::string& where);
  // A call of an assistant turn: remembers its id for results. `arguments` as JSON text or as an
  // object.
  ToolCall call(const std::string& id, std::string name, const JsonValue* arguments,
                const std::string& where);
  void check_result_id(const std::string& id, const std::string& where) const;
  // A picture or a film: its bytes, a data: or file:// URL, or the id of an uploaded file (which
  // decides what it is).
  ContentPart media(bool is_video, std::string bytes, double fps, const std::string& where);
  ContentPart media_url(bool is_video, const std::string& url, double fps,
                        const std::string& where);
  ContentPart media_file(const std::string& id, const std::string& where);
  void add_tool(const JsonValue& function, const std::string& where);
  void finish() const;  // the conversation as a whole

 private:
  const ModelInfo& info_;
  ApiRequest& request_;
  std::set<std::string> call_ids_;
  bool has_system_ = false, has_turn_ = false;
  std::string last_where_;
};

std::string decode_base64(std::string_view text,
                          const std::string& where);  // strict RFC 4648, padding needed

}  // namespace m3
