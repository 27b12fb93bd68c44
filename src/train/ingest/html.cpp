#include "train/ingest/html.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <unordered_set>

namespace m3::ingest {
namespace {

using Words = std::unordered_set<std::string_view>;

const Words kVoid = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"};
const Words kRaw = {"script", "style", "template", "noscript", "textarea", "svg", "math"};  // content is not text
const Words kLeftOut = {"nav", "header", "footer", "form", "button", "select", "iframe", "object", "aside"};
const Words kBlocks = {"address", "article", "blockquote", "body", "caption", "dd", "div", "dl", "dt", "figcaption", "figure", "h1",
                       "h2", "h3", "h4", "h5", "h6", "hr", "li", "main", "ol", "p", "pre", "section", "table", "tr", "ul"};
// Navigation as Sphinx, DocBook, Publican and Doxygen name it.
const Words kNavigation = {"sphinxsidebar", "related", "headerlink", "docnav", "navheader", "navfooter", "breadcrumb", "breadcrumbs",
                           "toc", "navpath", "header", "footer", "skip", "clearer", "producttitle"};

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return c < 0x80 ? std::tolower(c) : c; });
  return out;
}

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f'; }

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6);
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12);
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | code >> 18);
    out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

// The character of "&name;" without its frame; 0 if unknown.
uint32_t entity(std::string_view name) {
  if (name.starts_with('#')) {
    const bool hex = name.size() > 1 && (name[1] == 'x' || name[1] == 'X');
    name.remove_prefix(hex ? 2 : 1);
    uint32_t code = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), code, hex ? 16 : 10);
    const bool valid = error == std::errc() && end == name.data() + name.size() && code > 0 && code < 0x110000 &&
                       !(code >= 0xD800 && code < 0xE000);
    return valid ? code : 0;
  }
  static const std::map<std::string_view, uint32_t> kNamed = {
      {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}, {"nbsp", ' '}, {"copy", 0xA9}, {"reg", 0xAE},
      {"deg", 0xB0}, {"plusmn", 0xB1}, {"para", 0xB6}, {"sect", 0xA7}, {"middot", 0xB7}, {"times", 0xD7}, {"divide", 0xF7},
      {"laquo", 0xAB}, {"raquo", 0xBB}, {"frac12", 0xBD}, {"frac14", 0xBC}, {"sup2", 0xB2}, {"sup3", 0xB3}, {"micro", 0xB5},
      {"eacute", 0xE9}, {"egrave", 0xE8}, {"agrave", 0xE0}, {"aacute", 0xE1}, {"acirc", 0xE2}, {"auml", 0xE4}, {"ouml", 0xF6},
      {"uuml", 0xFC}, {"Auml", 0xC4}, {"Ouml", 0xD6}, {"Uuml", 0xDC}, {"szlig", 0xDF}, {"ccedil", 0xE7}, {"ntilde", 0xF1},
      {"oacute", 0xF3}, {"iacute", 0xED}, {"uacute", 0xFA}, {"oslash", 0xF8}, {"aring", 0xE5}, {"aelig", 0xE6},
      {"ndash", 0x2013}, {"mdash", 0x2014}, {"lsquo", 0x2018}, {"rsquo", 0x2019}, {"ldquo", 0x201C}, {"rdquo", 0x201D},
      {"bull", 0x2022}, {"hellip", 0x2026}, {"euro", 0x20AC}, {"trade", 0x2122}, {"larr", 0x2190}, {"uarr", 0x2191},
      {"rarr", 0x2192}, {"darr", 0x2193}, {"minus", 0x2212}, {"ne", 0x2260}, {"le", 0x2264}, {"ge", 0x2265}};
  const auto found = kNamed.find(name);
  return found == kNamed.end() ? 0 : found->second;
}

struct Tag {
  std::string name;
  bool closes = false;
  std::map<std::string, std::string> attributes;
};

// The tag whose '<' is at `at`; moves `at` behind its '>'.
Tag read_tag(std::string_view html, size_t& at) {
  Tag tag;
  ++at;
  if (at < html.size() && html[at] == '/') {
    tag.closes = true;
    ++at;
  }
  const auto end_of_word = [&](std::string_view stops) {
    const size_t end = html.find_first_of(stops, at);
    return end == html.npos ? html.size() : end;
  };
  size_t end = end_of_word(" \t\r\n\f/>");
  tag.name = lower(html.substr(at, end - at));
  at = end;
  while (at < html.size() && html[at] != '>') {
    if (is_blank(html[at]) || html[at] == '/') {
      ++at;
      continue;
    }
    end = end_of_word(" \t\r\n\f/>=");
    if (end == at) ++end;  // a stray sign
    const std::string name = lower(html.substr(at, end - at));
    at = end;
    std::string value;
    if (at < html.size() && html[at] == '=') {
      ++at;
      const char quote = at < html.size() && (html[at] == '"' || html[at] == '\'') ? html[at] : '\0';
      if (quote != '\0') ++at;
      end = quote != '\0' ? std::min(html.find(quote, at), html.size()) : end_of_word(" \t\r\n\f>");
      value = decode_entities(html.substr(at, end - at));
      at = std::min(end + (quote != '\0'), html.size());
    }
    tag.attributes.emplace(name, std::move(value));
  }
  at = std::min(at + 1, html.size());
  return tag;
}

class PageBuilder {
 public:
  void open(const Tag& tag) {
    if (tag.name == "img") {
      const auto src = tag.attributes.find("src");
      if (src != tag.attributes.end() && !src->second.empty() && !hidden()) add_image(tag);
    }
    if (kBlocks.count(tag.name)) block_break(tag.name);
    if (tag.name == "br") line_break();
    if (tag.name == "td" || tag.name == "th") add_text(" ");
    if (kVoid.count(tag.name)) return;
    stack_.push_back(tag.name);
    if (tag.name == "pre") ++pre_;
    if (!hidden() && (kLeftOut.count(tag.name) || is_navigation(tag))) hidden_from_ = stack_.size();
  }

  void close(const std::string& name) {
    const auto found = std::find(stack_.rbegin(), stack_.rend(), name);
    if (found == stack_.rend()) return;
    const size_t depth = static_cast<size_t>(stack_.rend() - found) - 1;
    for (size_t i = depth; i < stack_.size(); ++i) pre_ -= stack_[i] == "pre";
    stack_.resize(depth);
    if (hidden() && depth < hidden_from_) hidden_from_ = 0;
    if (kBlocks.count(name)) block_break("");
  }

  void text(std::string_view raw) {
    const std::string decoded = decode_entities(raw);
    if (!stack_.empty() && stack_.back() == "title") {
      page_.title += decoded;
      return;
    }
    if (!inside("head")) add_text(decoded);
  }

  HtmlPage finish() {
    if (!part_.text.empty()) page_.parts.push_back(std::move(part_));
    return std::move(page_);
  }

 private:
  bool hidden() const { return hidden_from_ > 0; }
  bool inside(std::string_view name) const { return std::find(stack_.begin(), stack_.end(), name) != stack_.end(); }

  static bool is_navigation(const Tag& tag) {
    for (const char* attribute : {"class", "id", "role"}) {
      const auto found = tag.attributes.find(attribute);
      if (found == tag.attributes.end()) continue;
      std::string_view words = found->second;
      while (!words.empty()) {
        const size_t end = words.find(' ');
        if (kNavigation.count(words.substr(0, end)) || words.substr(0, end) == "navigation") return true;
        words.remove_prefix(end == words.npos ? words.size() : end + 1);
      }
    }
    return false;
  }

  void add_text(std::string_view text) {
    if (hidden()) return;
    std::string& out = part_.text;
    for (char c : text) {
      if (pre_ > 0 && c == '\n' && breaks_ > 0) continue;  // due already
      if (pre_ > 0 || !is_blank(c)) {
        flush_breaks();
        out += c;
      } else if (!out.empty() && !is_blank(out.back()) && breaks_ == 0) {
        out += ' ';
      }
    }
  }

  void flush_breaks() {
    std::string& out = part_.text;
    while (!out.empty() && out.back() == ' ' && breaks_ > 0) out.pop_back();
    if (!out.empty()) out.append(static_cast<size_t>(breaks_), '\n');
    breaks_ = 0;
    if (item_) out += "- ";
    item_ = false;
  }
  void line_break() { breaks_ = std::max(breaks_, 1); }
  void block_break(std::string_view opened) {
    if (item_ && opened == "p") return;  // the paragraph that a list item begins with
    const bool tight = opened == "li" || opened == "tr" || opened == "dt" || opened == "dd";
    breaks_ = opened == "li" ? 1 : std::max(breaks_, tight ? 1 : 2);
    if (!hidden()) item_ = opened == "li";
  }

  void add_image(const Tag& tag) {
    part_.image = tag.attributes.at("src");
    const auto alt = tag.attributes.find("alt");
    if (alt != tag.attributes.end()) part_.alt = alt->second;
    page_.parts.push_back(std::move(part_));
    part_ = {};
    breaks_ = 0;
  }

  HtmlPage page_;
  HtmlPart part_;
  std::vector<std::string> stack_;  // open elements
  size_t hidden_from_ = 0;          // depth of the element that is left out with all inside; 0: none
  int pre_ = 0, breaks_ = 0;        // line breaks due before the next text
  bool item_ = false;               // a list item begins
};

}  // namespace

std::string decode_entities(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t end = text[i] == '&' ? text.find(';', i) : text.npos;
    constexpr size_t kLongestName = 10;
    const uint32_t code = end != text.npos && end - i <= kLongestName ? entity(text.substr(i + 1, end - i - 1)) : 0;
    if (code == 0) {
      out += text[i];
    } else {
      append_utf8(out, code);
      i = end;
    }
  }
  return out;
}

std::string decode_percent(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    uint32_t code = 0;
    const bool escaped = text[i] == '%' && i + 2 < text.size() &&
                         std::from_chars(text.data() + i + 1, text.data() + i + 3, code, 16).ptr == text.data() + i + 3;
    out += escaped ? static_cast<char>(code) : text[i];
    if (escaped) i += 2;
  }
  return out;
}

HtmlPage parse_html(std::string_view html) {
  PageBuilder builder;
  size_t at = 0;
  while (at < html.size()) {
    const size_t open = std::min(html.find('<', at), html.size());
    if (open > at) builder.text(html.substr(at, open - at));
    at = open;
    if (at >= html.size()) break;
    if (html.substr(at, 4) == "<!--") {
      const size_t end = html.find("-->", at + 4);
      at = end == html.npos ? html.size() : end + 3;
      continue;
    }
    const char next = at + 1 < html.size() ? html[at + 1] : ' ';
    if (next == '!' || next == '?') {
      at = std::min(html.find('>', at), html.size() - 1) + 1;
      continue;
    }
    if (!std::isalpha(static_cast<unsigned char>(next)) && next != '/') {
      builder.text("<");  // a sign in the text
      ++at;
      continue;
    }
    const Tag tag = read_tag(html, at);
    if (tag.closes) {
      builder.close(tag.name);
    } else if (kRaw.count(tag.name)) {
      const std::string end_tag = "</" + tag.name;
      size_t end = at;
      do {
        end = html.find("</", end);
        if (end == html.npos || lower(html.substr(end, end_tag.size())) == end_tag) break;
        end += 2;
      } while (true);
      at = end == html.npos ? html.size() : std::min(html.find('>', end), html.size() - 1) + 1;
    } else {
      builder.open(tag);
    }
  }
  return builder.finish();
}

}  // namespace m3::ingest
