// Cleaning of imported text, with a reason for everything that is left out.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace m3::ingest {

struct CleanOptions {
  int64_t min_letters = 200;        // of a document without media
  double max_symbol_share = 0.4;    // characters that are neither letters, digits nor white space
  double max_repeated_share = 0.5;  // bytes in lines that occurred before in the document
};

// Valid UTF-8: as it is; else read as Latin-1, which old documentation is in.
std::string to_utf8(std::string_view bytes);

// LF line ends, no control characters but tabs and line breaks, no blanks at line ends, at most one empty line
// in a row, no empty lines at the ends, no byte order mark, no soft hyphens.
std::string clean_text(std::string_view text);

// Why a document of this cleaned text (without media) is dropped: "too short", "mostly symbols", "repeated
// lines"; empty: it stays.
std::string reason_to_drop(std::string_view text, const CleanOptions& options);

// Cuts a long text at empty lines (else line ends, else blanks) into pieces of at most max_bytes.
std::vector<std::string> cut_text(std::string_view text, int64_t max_bytes);

}  // namespace m3::ingest
