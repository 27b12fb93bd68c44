#include "train/ingest/clean.h"

#include <algorithm>
#include <unordered_set>

#include "text/utf8.h"

namespace m3::ingest {
namespace {

bool is_letter(unsigned char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c >= 0x80; }

template <typename Visit>
void for_lines(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    visit(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
}

}  // namespace

std::string to_utf8(std::string_view bytes) {
  if (utf8_find_invalid(bytes) == bytes.npos) return std::string(bytes);
  std::string out;
  for (unsigned char c : bytes) {
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else {
      out += static_cast<char>(0xC0 | c >> 6);
      out += static_cast<char>(0x80 | (c & 0x3F));
    }
  }
  return out;
}

std::string clean_text(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF", kSoftHyphen = "\xC2\xAD";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::string plain;
  plain.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c == '\r') {
      if (i + 1 >= text.size() || text[i + 1] != '\n') plain += '\n';
    } else if (c == '\f') {
      plain += '\n';
    } else if (text.substr(i, 2) == kSoftHyphen) {
      ++i;
    } else if (c == '\n' || c == '\t' || (c >= 0x20 && c != 0x7F)) {
      plain += static_cast<char>(c);
    }
  }
  std::string out;
  int num_empty = 0;
  for_lines(plain, [&](std::string_view line) {
    const size_t end = line.find_last_not_of(" \t");
    line = line.substr(0, end == line.npos ? 0 : end + 1);
    if (line.empty()) {
      ++num_empty;
      return;
    }
    if (!out.empty()) out += num_empty > 0 ? "\n\n" : "\n";
    num_empty = 0;
    out += line;
  });
  return out;
}

std::string reason_to_drop(std::string_view text, const CleanOptions& options) {
  int64_t letters = 0, symbols = 0, visible = 0;
  for (unsigned char c : text) {
    if (c == ' ' || c == '\t' || c == '\n') continue;
    ++visible;
    letters += is_letter(c);
    symbols += !is_letter(c) && !(c >= '0' && c <= '9');
  }
  if (letters < options.min_letters) return "too short";
  if (static_cast<double>(symbols) > options.max_symbol_share * static_cast<double>(visible)) return "mostly symbols";
  std::unordered_set<std::string_view> seen;
  size_t repeated = 0;
  for_lines(text, [&](std::string_view line) {
    if (!line.empty() && !seen.insert(line).second) repeated += line.size();
  });
  if (static_cast<double>(repeated) > options.max_repeated_share * static_cast<double>(text.size())) return "repeated lines";
  return "";
}

std::vector<std::string> cut_text(std::string_view text, int64_t max_bytes) {
  const size_t most = static_cast<size_t>(max_bytes);
  std::vector<std::string> pieces;
  while (text.size() > most) {
    size_t end = std::string_view::npos;
    for (std::string_view border : {"\n\n", "\n", " "}) {
      end = text.rfind(border, most - border.size());
      if (end != text.npos && end > most / 4) {
        end += border.size();
        break;
      }
      end = text.npos;
    }
    if (end == text.npos) {  // one endless word: between two characters
      end = most;
      while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    }
    pieces.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  if (!text.empty()) pieces.emplace_back(text);
  return pieces;
}

}  // namespace m3::ingest
