#include "base/check.h"

namespace m3 {

void throw_error(const char* file, int line, std::string message) {
  throw Error(std::move(message), file, line);
}

}  // namespace m3
