// Threads over the rows of a matrix, for operations that treat each row on its own.
#pragma once
#include <cstdint>

#include "base/threads.h"

namespace m3 {

// Calls body(begin, end). Small work stays on the calling thread: starting threads costs a few microseconds, in
// which one core handles about this many elements.
template <typename F>
void parallel_rows(int64_t rows, int64_t elements_per_row, F&& body) {
  constexpr int64_t kSmall = 16384;
  if (rows * elements_per_row <= kSmall) {
    if (rows > 0) body(int64_t{0}, rows);
  } else {
    parallel_for(rows, body);
  }
}

}  // namespace m3
