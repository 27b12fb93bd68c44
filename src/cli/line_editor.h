// Lines from a terminal, with editing and history where libedit is compiled in.
#pragma once
#include <optional>
#include <string>

namespace m3::cli {

class LineEditor {
 public:
  std::optional<std::string> read(const char* prompt);  // empty at the end of input
};

}  // namespace m3::cli
