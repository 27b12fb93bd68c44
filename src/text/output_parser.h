// The M3 chat protocol, reading side (model.md §15.4; rules and cases: tests/golden/chat): what the
// model writes becomes reasoning, content and tool calls while it arrives. A marker is a token,
// never a spelling. Every damaged shape has a defined result; nothing throws. Pieces of any size
// give the same.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat.h"
#include "text/tokenizer.h"

namespace m3 {

struct OutputEvent {
  enum class Kind {
    kReasoning,      // text to append to the reasoning
    kContent,        // text to append to the content
    kCallBegin,      // text: the tool's name
    kCallArguments,  // text to append to the JSON of the call's arguments
    kCallEnd,        // the arguments are complete: they concatenate to one JSON object
  };
  Kind kind;
  int call = -1;  // index of the call, from 0
  std::string text;
  bool operator==(const OutputEvent&) const = default;
};

struct ParsedOutput {
  std::optional<std::string> reasoning;  // never empty
  std::optional<std::string> content;    // absent if empty beside calls or in a turn that was cut
  std::vector<ToolCall> tool_calls;
  bool complete = false;    // the end of the turn was reached, outside of reasoning and calls
  std::string parse_error;  // first damage found ("parameter 'x' outside of a call"), empty if none
};

enum class OutputMarker { kNamespace, kThinkOpen, kThinkClose, kTurnEnd };

// One object per answer, one thread at a time.
class OutputParser {
 public:
  // `prompt_tail`: the end of the rendered prompt; it decides whether the answer starts in
  // reasoning.
  OutputParser(std::span<const Tool> tools, std::string_view prompt_tail);
  ~OutputParser();
  OutputParser(OutputParser&&) noexcept;
  OutputParser& operator=(OutputParser&&) noexcept;

  // Text of ordinary tokens; events are appended. Whole characters in give whole characters out.
  void push_text(std::string_view text, std::vector<OutputEvent>& events);
  void push_marker(OutputMarker marker, std::vector<OutputEvent>& events);
  // The output is over (end of turn or cut): closes what is open. Call once.
  void finish(std::vector<OutputEvent>& events);

  bool in_reasoning() const;
  bool ended() const;                  // the end-of-turn marker came: later input is ignored
  const ParsedOutput& result() const;  // after finish()

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The same fed with token ids: decodes, and tells markers from text by their ids.
class TokenOutputParser {
 public:
  TokenOutputParser(const Tokenizer& tokenizer, std::span<const Tool> tools,
                    std::string_view prompt_tail);
  void push(int32_t id, std::vector<OutputEvent>& events);
  void finish(std::vector<OutputEvent>& events);
  const OutputParser& parser() const { return parser_; }
  const ParsedOutput& result() const { return parser_.result(); }

 private:
  StreamDecoder decoder_;
  OutputParser parser_;
  int32_t marker_ids_[4];  // in the order of OutputMarker; -1: the tokenizer has no such token
};

}  // namespace m3
