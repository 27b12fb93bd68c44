#include "text/output_parser.h"

#include <unordered_map>

#include "base/check.h"
#include "text/call_reader.h"
#include "text/output_lexer.h"

namespace m3 {

using Kind = OutputToken::Kind;

namespace {

// Reasoning or content. A protocol tag starts a new run; runs of white space alone vanish, the
// others are joined as they are. White space at the start of a run is held back until something
// follows it.
class TextRuns {
 public:
  void start_run() {
    held_space_.clear();
    has_text_ = false;
  }
  // Returns what to release.
  std::string append(std::string_view text) {
    if (!has_text_ && text.find_first_not_of(" \t\r\n") == text.npos) {
      held_space_ += text;
      return {};
    }
    std::string released = std::move(held_space_);
    held_space_.clear();
    released += text;
    has_text_ = true;
    total_ += released;
    return released;
  }
  const std::string& total() const { return total_; }

 private:
  std::string total_, held_space_;
  bool has_text_ = false;
};

}  // namespace

struct OutputParser::Impl {
  Impl(std::span<const Tool> tool_list, std::string_view prompt_tail)
      : thinking(prompt_tail.ends_with(chat_token::kThinkOpen)) {
    for (const Tool& tool : tool_list) tools[tool.name()] = tool;
  }

  void on_token(const OutputToken& token, std::vector<OutputEvent>& events) {
    if (ended) return;
    if (ignored && !push_ignored(token)) return;
    if (call && !push_call(token, events)) return;
    push_outside(token, events);
  }

  // Both return whether the token is still to be handled.
  bool push_ignored(const OutputToken& token) {
    const ElementReader::Step step = ignored->push(token);
    if (step != ElementReader::Step::kOpen) ignored.reset();
    return step == ElementReader::Step::kEscaped;
  }
  bool push_call(const OutputToken& token, std::vector<OutputEvent>& events) {
    std::string deltas;
    const ElementReader::Step step = call->push(token, deltas);
    const bool over = step != ElementReader::Step::kOpen;
    if (over) call->end(deltas);
    emit(OutputEvent::Kind::kCallArguments, std::move(deltas), events);
    if (!over) return false;
    result.tool_calls.push_back(call->take());
    call.reset();
    events.push_back({OutputEvent::Kind::kCallEnd, num_calls - 1, {}});
    if (token.kind == Kind::kEnd || token.kind == Kind::kCut) {
      damage(fmt::format("the call of '{}' was cut", result.tool_calls.back().name));
      ended = true;  // not complete
      return false;
    }
    return step == ElementReader::Step::kEscaped;
  }

  void push_outside(const OutputToken& token, std::vector<OutputEvent>& events) {
    const bool is_tag = token.kind == Kind::kOpen || token.kind == Kind::kClose;
    switch (token.kind) {
      case Kind::kText:
        return append(token.value, events);
      case Kind::kMark:
        return damage("a namespace marker that no tag follows");
      case Kind::kEnd:
        result.complete = !thinking;
        ended = true;
        return;
      case Kind::kCut:
        ended = true;
        return;
      default:
        break;
    }
    if (is_tag && token.value != "tool_call" && token.value != "invoke" && !in_block) {
      damage(fmt::format("a namespace marker before the tag '{}'", token.value));
      return append(fmt::format("<{}{}>", token.kind == Kind::kClose ? "/" : "", token.value),
                    events);
    }
    reasoning.start_run();
    content.start_run();
    if (token.kind == Kind::kThink || token.kind == Kind::kUnthink) {
      thinking = token.kind == Kind::kThink;
      in_block = false;
    } else if (token.kind == Kind::kInvoke) {
      begin_call(std::string(token.value), events);
    } else if (token.value == "tool_call") {
      thinking = false;
      in_block = token.kind == Kind::kOpen;
    } else if (token.kind == Kind::kOpen) {
      damage(fmt::format("the parameter '{}' stands outside of any call", token.value));
      ignored_raw.clear();
      ignored.emplace(std::string(token.value), ignored_raw);
    }
  }

  void begin_call(std::string name, std::vector<OutputEvent>& events) {
    thinking = false;
    const auto tool = tools.find(name);
    events.push_back({OutputEvent::Kind::kCallBegin, num_calls++, name});
    call.emplace(std::move(name), tool == tools.end() ? nullptr : tool->second.parameters());
  }

  void append(std::string_view text, std::vector<OutputEvent>& events) {
    emit(thinking ? OutputEvent::Kind::kReasoning : OutputEvent::Kind::kContent,
         (thinking ? reasoning : content).append(text), events);
  }

  // Joins text to the event before it where that is of the same kind.
  void emit(OutputEvent::Kind kind, std::string text, std::vector<OutputEvent>& events) const {
    if (text.empty()) return;
    const int index = kind == OutputEvent::Kind::kCallArguments ? num_calls - 1 : -1;
    if (!events.empty() && events.back().kind == kind && events.back().call == index) {
      events.back().text += text;
    } else {
      events.push_back({kind, index, std::move(text)});
    }
  }

  void damage(std::string what) {
    if (result.parse_error.empty()) result.parse_error = std::move(what);
  }

  std::unordered_map<std::string, Tool> tools;
  OutputLexer lexer;
  bool thinking;
  bool in_block = false;  // between the outer tags of a block of calls
  bool ended = false;
  TextRuns reasoning, content;
  std::optional<CallReader> call;
  int num_calls = 0;
  std::optional<ElementReader> ignored;  // a parameter outside of any call
  std::string ignored_raw;
  ParsedOutput result;
};

OutputParser::OutputParser(std::span<const Tool> tools, std::string_view prompt_tail)
    : impl_(std::make_unique<Impl>(tools, prompt_tail)) {}
OutputParser::~OutputParser() = default;
OutputParser::OutputParser(OutputParser&&) noexcept = default;
OutputParser& OutputParser::operator=(OutputParser&&) noexcept = default;

void OutputParser::push_text(std::string_view text, std::vector<OutputEvent>& events) {
  if (impl_->ended) return;
  impl_->lexer.push_text(text, [&](const OutputToken& token) { impl_->on_token(token, events); });
}

void OutputParser::push_marker(OutputMarker marker, std::vector<OutputEvent>& events) {
  if (impl_->ended) return;
  impl_->lexer.push_marker(marker,
                           [&](const OutputToken& token) { impl_->on_token(token, events); });
}

void OutputParser::finish(std::vector<OutputEvent>& events) {
  impl_->lexer.finish([&](const OutputToken& token) { impl_->on_token(token, events); });
  ParsedOutput& result = impl_->result;
  if (!impl_->reasoning.total().empty()) result.reasoning = impl_->reasoning.total();
  if (!impl_->content.total().empty() || (result.tool_calls.empty() && result.complete)) {
    result.content = impl_->content.total();
  }
}

bool OutputParser::in_reasoning() const {
  return impl_->thinking && !impl_->ended;
}
bool OutputParser::ended() const {
  return impl_->ended;
}
const ParsedOutput& OutputParser::result() const {
  return impl_->result;
}

TokenOutputParser::TokenOutputParser(const Tokenizer& tokenizer, std::span<const Tool> tools,
                                     std::string_view prompt_tail)
    : decoder_(tokenizer), parser_(tools, prompt_tail) {
  using namespace chat_token;
  constexpr std::string_view kMarkers[] = {kNamespace, kThinkOpen, kThinkClose, kTurnEnd};
  for (size_t i = 0; i < 4; ++i) marker_ids_[i] = tokenizer.added_id(kMarkers[i]).value_or(-1);
}

void TokenOutputParser::push(int32_t id, std::vector<OutputEvent>& events) {
  for (size_t i = 0; i < 4; ++i) {
    if (id != marker_ids_[i] || id < 0) continue;
    parser_.push_text(decoder_.finish(), events);
    parser_.push_marker(static_cast<OutputMarker>(i), events);
    return;
  }
  parser_.push_text(decoder_.push(id), events);
}

void TokenOutputParser::finish(std::vector<OutputEvent>& events) {
  parser_.push_text(decoder_.finish(), events);
  parser_.finish(events);
}

}  // namespace m3
