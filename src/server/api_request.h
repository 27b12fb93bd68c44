// One form for what all API families ask (serving.md §3 to §7). The families' readers fill it;
// nothing behind them knows which family a request came from.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/sampling/sampling.h"
#include "text/chat.h"

namespace m3 {

class FileStore;

struct MediaSource {
  bool is_video = false;
  std::string bytes;  // the file
  double fps = 1;     // of a film: frames to keep per second
  std::string where;  // the field that named it, for messages
};

struct ToolChoice {
  enum class Kind : uint8_t { kAuto, kNone, kRequired, kNamed };
  Kind kind = Kind::kAuto;
  std::string name;  // of kNamed
};

struct AnswerForm {
  enum class Kind : uint8_t { kText, kJsonObject, kJsonSchema, kRegex, kChoice };
  Kind kind = Kind::kText;
  JsonValue schema;
  std::string regex;
  std::vector<std::string> choices;
  std::string where;
};

struct RawPrompt {
  std::string text;
  std::vector<int32_t> ids;  // used instead of the text unless empty
};

struct ApiRequest {
  std::string model;

  // A conversation ...
  std::vector<Message> messages;
  std::vector<MediaSource> media;  // of all media parts of all messages, in order
  std::vector<Tool> tools;
  ToolChoice tool_choice;
  bool parallel_tool_calls = true;
  AnswerForm form;
  std::string thinking_mode;  // enabled, disabled or adaptive
  std::optional<std::string> model_identity;
  // ... or plain prompts, each answered n times.
  std::vector<RawPrompt> prompts;
  bool echo = false;

  SamplingParams sampling;
  bool has_seed = false;
  int n = 1;
  std::optional<int64_t> max_tokens;
  int64_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  std::vector<std::string> stop;
  bool logprobs = false;
  int top_logprobs = 0;

  bool stream = false, include_usage = false, return_progress = false, return_token_ids = false;
  JsonValue echo_fields;  // what the responses API repeats in its answers
  std::vector<std::string> ignored_fields;
};

// What readers need to know of the model and of the server's settings.
struct ModelInfo {
  std::string id;
  std::vector<std::string> aliases;
  int64_t max_model_len = 0;
  int32_t num_ids = 0;  // of the tokenizer
  bool has_vision = false;
  double temperature = 1, top_p = 0.95;  // defaults
  int top_k = 40;
  std::string default_thinking = "adaptive";
  bool drop_late_system = false;  // later system messages are dropped instead of refused
  std::string media_folder;       // file:// URLs below it are allowed; empty: none
  FileStore* files = nullptr;     // uploads; null pointer: switched off
  std::string cache_type, device, version;
};

}  // namespace m3
