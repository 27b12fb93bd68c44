// Reads one tool call while it arrives and gives its arguments out as JSON text: the deltas
// concatenate to one object, equal to what the whole call converts to.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/output_lexer.h"
#include "text/tool_arguments.h"

namespace m3 {

// Reads one element from behind its opening tag to its end, with everything inside.
class ElementReader {
 public:
  // Text is appended to `raw`, beginning with the opening tag.
  ElementReader(std::string name, std::string& raw);

  enum class Step {
    kOpen,     // the token was taken, the element goes on
    kClosed,   // the token was taken and closed the element
    kEscaped,  // the token ends the element but belongs to what is around it
  };
  Step push(const OutputToken& token);
  size_t raw_begin() const { return stack_[0].element.raw_begin; }
  const std::string& name() const { return stack_[0].element.name; }
  CallElement take() { return std::move(stack_[0].element); }  // after the end

 private:
  struct Frame {
    CallElement element;
    size_t elided_begin =
        std::string::npos;  // text behind a marker without a tag: a value without opening tag?
  };
  void open(std::string_view name);
  void pop(std::string_view closed_by, bool cut);
  void close_elided(std::string_view name);
  bool encloses(std::string_view name) const;

  std::string& raw_;
  std::vector<Frame> stack_;
};

class CallReader {
 public:
  // `parameters`: the tool's schema, a null pointer if unknown; it must outlive the reader.
  CallReader(std::string name, const JsonValue* parameters);
  CallReader(const CallReader&) = delete;
  CallReader& operator=(const CallReader&) = delete;

  // Appends to `deltas`. kEscaped: the call is over and the token was not taken; call end().
  ElementReader::Step push(const OutputToken& token, std::string& deltas);
  // Closes the JSON. The arguments are in take() from then on.
  void end(std::string& deltas);
  ToolCall take() { return {std::move(name_), builder_.take()}; }

 private:
  void open_element(std::string_view name, std::string& deltas);
  void close_element(std::string& deltas);
  void close_tag(std::string_view name, std::string& deltas);
  bool is_barrier(const CallElement& element) const;
  void append(CallElement element, std::string& deltas);
  void commit_all(std::string& deltas);
  void commit(const CallElement& element, std::string& deltas);
  void flush_mergeable(std::string& deltas);
  void write_key(std::string_view key, std::string& deltas);
  void write_member(size_t index, std::string& deltas);
  void stream_string(std::string& deltas);
  bool can_stream(const std::string& name) const;

  std::string name_;
  std::string raw_;  // all text inside of elements
  ArgumentBuilder builder_;
  std::optional<ElementReader> element_;  // the parameter being read
  std::string stray_;      // text outside of elements: perhaps a value without opening tag
  bool has_mark_ = false;  // a marker without a tag came before it
  std::vector<CallElement> waiting_;  // elements that a later closing tag may still wrap

  bool has_members_ = false;  // of the JSON written so far
  std::optional<size_t>
      mergeable_;  // last key: not written yet, as a repetition would change its value
  std::vector<size_t> changed_;  // keys whose value changed after they were written
  bool may_stream_ = false;      // the open element is a string whose text goes out as it comes
  bool may_be_null_ = false;
  size_t streamed_ = 0;  // end of what was written of it; 0: nothing yet
};

}  // namespace m3
