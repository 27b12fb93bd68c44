#include "text/added_tokens.h"

#include <algorithm>

#include "text/pretokenizer.h"

namespace m3 {

namespace {

// Unicode's White_Space outside ASCII, as UTF-8.
constexpr std::string_view kWideSpaces[] = {"\u0085", "\u00A0", "\u1680", "\u2000", "\u2001",
                                            "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
                                            "\u2007", "\u2008", "\u2009", "\u200A", "\u2028",
                                            "\u2029", "\u202F", "\u205F", "\u3000"};

bool is_ascii_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

size_t leading_space_bytes(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    size_t length = is_ascii_space(text[at]) ? 1 : 0;
    for (std::string_view space : kWideSpaces) {
      if (text.substr(at).starts_with(space)) length = space.size();
    }
    if (length == 0) break;
    at += length;
  }
  return at;
}

size_t trailing_space_bytes(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t length = is_ascii_space(text[end - 1]) ? 1 : 0;
    for (std::string_view space : kWideSpaces) {
      if (text.substr(0, end).ends_with(space)) length = space.size();
    }
    if (length == 0) break;
    end -= length;
  }
  return text.size() - end;
}

bool touches(std::span<const TextRange> ranges, size_t begin, size_t end) {
  auto after = std::lower_bound(ranges.begin(), ranges.end(), begin,
                                      [](const TextRange& range, size_t at) { return range.end <= at; });
  while (after != ranges.end() && after->begin == after->end) ++after;  // an empty range covers nothing
  return after != ranges.end() && after->begin < end;
}

}  // namespace

int AddedTokenMatcher::child(int node, unsigned char byte) const {
  const auto& children = nodes_[static_cast<size_t>(node)].children;
  const auto at = std::lower_bound(children.begin(), children.end(), std::pair(byte, 0));
  return at != children.end() && at->first == byte ? at->second : -1;
}

void AddedTokenMatcher::add(const AddedToken& token) {
  int node = 0;
  for (char c : token.content) {
    const auto byte = static_cast<unsigned char>(c);
    int next = child(node, byte);
    if (next < 0) {
      next = static_cast<int>(nodes_.size());
      nodes_.emplace_back();
      auto& children = nodes_[static_cast<size_t>(node)].children;
      const std::pair entry(byte, next);
      children.insert(std::lower_bound(children.begin(), children.end(), entry), entry);
    }
    node = next;
  }
  nodes_[static_cast<size_t>(node)].token = static_cast<int>(tokens_.size());
  starts_[static_cast<unsigned char>(token.content[0])] = true;
  tokens_.push_back(token);
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::find(std::string_view text,
                                                                size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<unsigned char>(text[begin])]) continue;
    int node = 0, longest = -1;
    size_t end = begin;
    for (size_t at = begin; at < text.size(); ++at) {
      node = child(node, static_cast<unsigned char>(text[at]));
      if (node < 0) break;
      if (nodes_[static_cast<size_t>(node)].token >= 0) {
        longest = nodes_[static_cast<size_t>(node)].token;
        end = at + 1;
      }
    }
    if (longest >= 0) return Match{begin, end, &tokens_[static_cast<size_t>(longest)]};
  }
  return std::nullopt;
}

void AddedTokenMatcher::cut(std::string_view text, std::vector<Part>& parts,
                            std::span<const TextRange> plain, size_t offset) const {
  size_t done = 0;  // end of the last token with the white space that it took
  size_t from = 0;  // where to look next: white space taken by rstrip can still hold a token
  while (const auto match = find(text, from)) {
    if (touches(plain, offset + match->begin, offset + match->end)) {
      from = match->begin + 1;
      continue;
    }
    from = match->end;
    size_t begin = match->begin, end = match->end;
    if (match->token->single_word && (ends_with_word_character(text.substr(0, begin)) ||
                                      starts_with_word_character(text.substr(end)))) {
      continue;
    }
    if (match->token->lstrip)
      begin = std::max(done, begin - trailing_space_bytes(text.substr(0, begin)));
    if (match->token->rstrip) end += leading_space_bytes(text.substr(end));
    if (done < begin) parts.push_back({text.substr(done, begin - done), nullptr});
    parts.push_back({text.substr(begin, end - begin), match->token});
    done = end;
  }
  if (done < text.size()) parts.push_back({text.substr(done), nullptr});
}

}  // namespace m3
