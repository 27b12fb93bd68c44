#include "cli/line_editor.h"

#ifdef M3_HAVE_EDITLINE
#include <editline/readline.h>

#include <cstdlib>
#else
#include <cstdio>
#include <iostream>
#endif

namespace m3::cli {

#ifdef M3_HAVE_EDITLINE

std::optional<std::string> LineEditor::read(const char* prompt) {
  char* line = ::readline(prompt);
  if (line == nullptr) return std::nullopt;
  std::string text = line;
  if (!text.empty()) ::add_history(line);
  std::free(line);
  return text;
}

#else

std::optional<std::string> LineEditor::read(const char* prompt) {
  std::fputs(prompt, stderr);
  std::string text;
  if (!std::getline(std::cin, text)) return std::nullopt;
  return text;
}

#endif

}  // namespace m3::cli
