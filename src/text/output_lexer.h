// Cuts the model's output into protocol tokens. A tag of a tool call is the namespace marker
// followed by <invoke name="...">, <name> or </name> in ordinary text; text without the marker is
// never a tag.
#pragma once
#include <string>
#include <string_view>

#include "text/output_parser.h"

namespace m3 {

struct OutputToken {
  enum class Kind {
    kText,
    kThink,    // opens reasoning
    kUnthink,  // closes it
    kEnd,      // end of turn
    kCut,      // the output is over without it
    kInvoke,   // value: the tool's name
    kOpen,     // value: the tag's name
    kClose,
    kMark,  // a namespace marker that no tag follows
  };
  Kind kind;
  std::string_view value = {};
};

class OutputLexer {
 public:
  // `sink` is called with OutputToken; values live until it returns. A run of text may come in
  // several tokens, cut anywhere.
  template <typename Sink>
  void push_text(std::string_view text, Sink&& sink) {
    if (text.empty()) return;
    if (!after_mark_) return sink(OutputToken{OutputToken::Kind::kText, text});
    held_ += text;
    decide(Follows::kAnything, sink);
  }

  template <typename Sink>
  void push_marker(OutputMarker marker, Sink&& sink) {
    if (after_mark_)
      decide(marker == OutputMarker::kTurnEnd ? Follows::kTurnEnd : Follows::kMarker, sink);
    after_mark_ = marker == OutputMarker::kNamespace;
    if (marker == OutputMarker::kThinkOpen) sink(OutputToken{OutputToken::Kind::kThink});
    if (marker == OutputMarker::kThinkClose) sink(OutputToken{OutputToken::Kind::kUnthink});
    if (marker == OutputMarker::kTurnEnd) sink(OutputToken{OutputToken::Kind::kEnd});
  }

  template <typename Sink>
  void finish(Sink&& sink) {
    if (after_mark_) decide(Follows::kCut, sink);
    sink(OutputToken{OutputToken::Kind::kCut});
  }

 private:
  // What comes behind the held text: more text perhaps, a marker, or the end in one of two ways.
  enum class Follows { kAnything, kMarker, kTurnEnd, kCut };
  struct Match {
    enum class Kind { kUndecided, kTag, kNoTag, kHalfTag };
    Kind kind;
    OutputToken::Kind tag = OutputToken::Kind::kMark;
    std::string_view name = {};
    size_t length = 0;
  };
  static Match match_tag(std::string_view text, Follows follows);

  template <typename Sink>
  void decide(Follows follows, Sink&& sink) {
    std::string text;
    text.swap(held_);
    const Match match = match_tag(text, follows);
    if (match.kind == Match::Kind::kUndecided) return held_.swap(text);
    after_mark_ = false;
    if (match.kind == Match::Kind::kHalfTag) return;
    sink(OutputToken{match.tag, match.name});
    const std::string_view rest = std::string_view(text).substr(match.length);
    if (!rest.empty()) sink(OutputToken{OutputToken::Kind::kText, rest});
  }

  bool after_mark_ = false;
  std::string held_;  // text behind a namespace marker, until it is known to be a tag or not
};

}  // namespace m3
