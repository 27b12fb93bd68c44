#include "text/call_reader.h"

#include <algorithm>

namespace m3 {

using Kind = OutputToken::Kind;

namespace {

constexpr std::string_view kSpace = " \t\r\n";
// Deeper tags are text: no schema nests like this, and recursion stays bounded.
constexpr size_t kMaxDepth = 128;

void append_tag(std::string_view before, std::string_view name, std::string& out) {
  out += before;
  out += name;
  out += '>';
}

// Could the text become the literal null with white space around it?
bool may_become_null(std::string_view text) {
  constexpr std::string_view kNull = "null";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == text.npos) return true;
  const std::string_view word = text.substr(first, kNull.size());
  return kNull.starts_with(word) &&
         text.find_first_not_of(kSpace, first + word.size()) == text.npos;
}

}  // namespace

// --- one element

ElementReader::ElementReader(std::string name, std::string& raw) : raw_(raw) {
  open(name);
}

void ElementReader::open(std::string_view name) {
  append_tag("<", name, raw_);
  stack_.emplace_back();
  stack_.back().element.name = name;
  stack_.back().element.raw_begin = raw_.size();
}

// Ends the innermost element; the outermost one stays on the stack for take().
void ElementReader::pop(std::string_view closed_by, bool cut) {
  CallElement& element = stack_.back().element;
  element.raw_end = raw_.size();
  element.closed_by = closed_by;
  element.cut = cut;
  if (stack_.size() == 1) return;
  if (!closed_by.empty()) append_tag("</", closed_by, raw_);
  CallElement child = std::move(element);
  stack_.pop_back();
  stack_.back().element.children.push_back(std::move(child));
}

void ElementReader::close_elided(std::string_view name) {
  Frame& frame = stack_.back();
  CallElement child;
  child.name = name;
  child.raw_begin = frame.elided_begin;
  child.raw_end = raw_.size();
  child.closed_by = name;
  frame.element.children.push_back(std::move(child));
  frame.elided_begin = std::string::npos;
  append_tag("</", name, raw_);
}

bool ElementReader::encloses(std::string_view name) const {
  if (name == "invoke" || name == "tool_call") return true;
  for (size_t i = 0; i + 1 < stack_.size(); ++i) {
    if (stack_[i].element.name == name) return true;
  }
  return false;
}

ElementReader::Step ElementReader::push(const OutputToken& token) {
  switch (token.kind) {
    case Kind::kThink:
    case Kind::kUnthink:
      return Step::kOpen;
    case Kind::kText:
      raw_ += token.value;
      return Step::kOpen;
    case Kind::kMark:
      stack_.back().elided_begin = raw_.size();
      return Step::kOpen;
    case Kind::kOpen:
      stack_.back().elided_begin = std::string::npos;
      if (stack_.size() < kMaxDepth) {
        open(token.value);
      } else {
        append_tag("<", token.value, raw_);
      }
      return Step::kOpen;
    case Kind::kEnd:
    case Kind::kCut:
    case Kind::kInvoke: {
      const bool cut = token.kind != Kind::kInvoke;
      while (stack_.size() > 1) pop({}, cut);
      pop({}, cut);
      return Step::kEscaped;
    }
    case Kind::kClose:
      break;
  }
  // A closing tag of an element further out ends the ones inside of it.
  while (token.value != stack_.back().element.name && encloses(token.value)) {
    const bool is_outermost = stack_.size() == 1;
    pop({}, false);
    if (is_outermost) return Step::kEscaped;
  }
  if (stack_.back().elided_begin != std::string::npos &&
      token.value != stack_.back().element.name) {
    close_elided(token.value);
    return Step::kOpen;
  }
  const bool is_outermost = stack_.size() == 1;
  pop(token.value, false);
  return is_outermost ? Step::kClosed : Step::kOpen;
}

// --- the call

CallReader::CallReader(std::string name, const JsonValue* parameters)
    : name_(std::move(name)), builder_(raw_, ToolSchema(parameters, parameters)) {}

ElementReader::Step CallReader::push(const OutputToken& token, std::string& deltas) {
  using Step = ElementReader::Step;
  if (element_) {
    const Step step = element_->push(token);
    if (may_stream_) stream_string(deltas);
    if (step != Step::kOpen) close_element(deltas);
    if (step != Step::kEscaped) return Step::kOpen;
  }
  switch (token.kind) {
    case Kind::kEnd:
    case Kind::kCut:
    case Kind::kInvoke:
      return Step::kEscaped;
    case Kind::kThink:
    case Kind::kUnthink:
      break;
    case Kind::kText:
      stray_ += token.value;
      break;
    case Kind::kMark:
      stray_.clear();
      has_mark_ = true;
      break;
    case Kind::kOpen:
      if (token.value == "tool_call") return Step::kEscaped;
      open_element(token.value, deltas);
      break;
    case Kind::kClose:
      if (token.value == "tool_call") return Step::kEscaped;
      if (token.value == "invoke") return Step::kClosed;
      close_tag(token.value, deltas);
      break;
  }
  return Step::kOpen;
}

void CallReader::end(std::string& deltas) {
  commit_all(deltas);
  flush_mergeable(deltas);
  // Rare: a parameter was repeated after others had been written. JSON readers take the last of two
  // equal keys, so the key is written again with its whole value.
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  for (size_t index : changed_) write_member(index, deltas);
  deltas += has_members_ ? "}" : "{}";
}

void CallReader::open_element(std::string_view name, std::string& deltas) {
  stray_.clear();
  has_mark_ = false;
  element_.emplace(std::string(name), raw_);
  const std::string key(name);
  if (!builder_.schema().declares(key)) return;
  commit_all(deltas);  // a declared element bounds what a later closing tag can wrap
  may_stream_ = !builder_.has(key) && can_stream(key);
  may_be_null_ = may_stream_ && builder_.schema().member(key).types().has(SchemaTypes::kNull);
  streamed_ = 0;
}

bool CallReader::can_stream(const std::string& name) const {
  const SchemaTypes types = builder_.schema().member(name).types();
  return types.only_unknown() || (types.has(SchemaTypes::kString) &&
                                  !types.has(SchemaTypes::kArray | SchemaTypes::kObject));
}

void CallReader::stream_string(std::string& deltas) {
  const size_t begin = element_->raw_begin();
  const std::string_view text = std::string_view(raw_).substr(begin);
  if (streamed_ == 0) {
    if (text.empty() || (may_be_null_ && may_become_null(text))) return;
    flush_mergeable(deltas);
    write_key(element_->name(), deltas);
    deltas += '"';
    streamed_ = begin;
  }
  json_escape(std::string_view(raw_).substr(streamed_), deltas);
  streamed_ = raw_.size();
}

void CallReader::close_element(std::string& deltas) {
  CallElement element = element_->take();
  element_.reset();
  const bool was_streamed = may_stream_ && streamed_ > 0;
  may_stream_ = false;
  if (was_streamed) {
    deltas += '"';
    builder_.add(element);
  } else {
    append(std::move(element), deltas);
  }
}

// A closing tag outside of any element: the value's opening tag is missing.
void CallReader::close_tag(std::string_view name, std::string& deltas) {
  CallElement element;
  element.name = element.closed_by = name;
  if (has_mark_ || stray_.find_first_not_of(kSpace) != stray_.npos) {
    element.raw_begin = raw_.size();
    raw_ += stray_;
    element.raw_end = raw_.size();
    append(std::move(element), deltas);
  } else if (builder_.schema().declares(name) || !builder_.schema().has_properties()) {
    // It belongs to an object or array, whose members stand directly before.
    if (!waiting_.empty()) {
      element.children = std::move(waiting_);
      waiting_.clear();
      append(std::move(element), deltas);
    }
  }
  stray_.clear();
  has_mark_ = false;
}

// What a closing tag without its opening tag does not take for its own: declared parameters, or
// where nothing is declared, everything but items.
bool CallReader::is_barrier(const CallElement& element) const {
  const ToolSchema& schema = builder_.schema();
  return schema.has_properties() ? schema.declares(element.name) : element.name != "item";
}

void CallReader::append(CallElement element, std::string& deltas) {
  const bool barrier = is_barrier(element);
  waiting_.push_back(std::move(element));
  if (barrier) commit_all(deltas);
}

void CallReader::commit_all(std::string& deltas) {
  for (const CallElement& element : waiting_) commit(element, deltas);
  waiting_.clear();
}

void CallReader::commit(const CallElement& element, std::string& deltas) {
  const ArgumentBuilder::Added added = builder_.add(element);
  if (added.change == ArgumentBuilder::Change::kNewKey) {
    flush_mergeable(deltas);
    if (added.may_merge) {
      mergeable_ = added.index;
    } else {
      write_member(added.index, deltas);
    }
  } else if (added.change == ArgumentBuilder::Change::kMerged && mergeable_ != added.index) {
    changed_.push_back(added.index);
  }
}

void CallReader::flush_mergeable(std::string& deltas) {
  if (!mergeable_) return;
  write_member(*mergeable_, deltas);
  mergeable_.reset();
}

void CallReader::write_key(std::string_view key, std::string& deltas) {
  deltas += has_members_ ? ",\"" : "{\"";
  json_escape(key, deltas);
  deltas += "\":";
  has_members_ = true;
}

void CallReader::write_member(size_t index, std::string& deltas) {
  write_key(builder_.object().keys()[index], deltas);
  deltas += builder_.object().items()[index].dump();
}

}  // namespace m3
