#include "text/output_lexer.h"

namespace m3 {

namespace {

constexpr std::string_view kInvokeHead = "invoke name=\"";
// A tag longer than this is no tag: the held text stays small.
constexpr size_t kMaxTagBytes = 4096;

enum class Fit { kNo, kPartly, kWhole };
struct TagFit {
  Fit fit = Fit::kNo;
  OutputToken::Kind kind = OutputToken::Kind::kMark;
  std::string_view name = {};
  size_t length = 0;
};

// invoke name="...">, with or without the first angle bracket (deployments have seen it missing).
TagFit fit_invoke(std::string_view text) {
  const size_t bracket = text.starts_with('<') ? 1 : 0;
  const std::string_view body = text.substr(bracket);
  if (body.size() < kInvokeHead.size())
    return {kInvokeHead.starts_with(body) ? Fit::kPartly : Fit::kNo};
  if (!body.starts_with(kInvokeHead)) return {};
  const size_t quote = body.find('"', kInvokeHead.size());
  if (quote == body.npos || quote + 1 == body.size()) return {Fit::kPartly};
  if (body[quote + 1] != '>') return {};
  return {Fit::kWhole, OutputToken::Kind::kInvoke,
          body.substr(kInvokeHead.size(), quote - kInvokeHead.size()), bracket + quote + 2};
}

// <name> or </name>; names hold no angle brackets and no line breaks.
TagFit fit_tag(std::string_view text) {
  if (text.empty()) return {Fit::kPartly};
  if (text[0] != '<') return {};
  const size_t end = text.find_first_of("<>\n", 1);
  if (end == text.npos) return {Fit::kPartly};
  if (text[end] != '>' || end == 1) return {};
  const std::string_view inside = text.substr(1, end - 1);
  if (inside.size() > 1 && inside[0] == '/')
    return {Fit::kWhole, OutputToken::Kind::kClose, inside.substr(1), end + 1};
  return {Fit::kWhole, OutputToken::Kind::kOpen, inside, end + 1};
}

}  // namespace

OutputLexer::Match OutputLexer::match_tag(std::string_view text, Follows follows) {
  const std::string_view head = text.substr(0, kMaxTagBytes);
  const TagFit invoke = fit_invoke(head), tag = fit_tag(head);
  const bool has_half_invoke = head.starts_with(kInvokeHead) && head.find('>') == head.npos;
  if (invoke.fit == Fit::kWhole)
    return {Match::Kind::kTag, invoke.kind, invoke.name, invoke.length};
  if (follows == Follows::kAnything && head.size() < kMaxTagBytes &&
      (invoke.fit == Fit::kPartly || tag.fit == Fit::kPartly || has_half_invoke)) {
    return {Match::Kind::kUndecided};
  }
  if (tag.fit == Fit::kWhole) return {Match::Kind::kTag, tag.kind, tag.name, tag.length};
  // An output that ends inside a tag does not show the piece.
  const bool is_half = tag.fit == Fit::kPartly || has_half_invoke ||
                       (follows == Follows::kCut && kInvokeHead.starts_with(head));
  if (is_half && (follows == Follows::kTurnEnd || follows == Follows::kCut))
    return {Match::Kind::kHalfTag};
  return {Match::Kind::kNoTag};
}

}  // namespace m3
