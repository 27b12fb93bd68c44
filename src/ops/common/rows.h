// Threads over the rows of a matrix, for operations that treat each row on its own, and sums over rows in a fixed order.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/threads.h"
#include "tensor/arena.h"

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

// Sums over rows for the gradients of small parameters: each block of 64 rows is summed by one thread into its own
// `width` floats, then the blocks are added in order. The bits do not depend on the threads.
class BlockSums {
 public:
  static constexpr int64_t kRows = 64;
  static int64_t scratch_bytes(int64_t rows, int64_t width) {
    return (rows + kRows - 1) / kRows * width * 4 + 2 * Arena::kAlignment;
  }

  // Calls body(begin, end, sums) for each block; sums start at 0.
  template <typename F>
  BlockSums(int64_t rows, int64_t width, Arena& scratch, F&& body)
      : count_((rows + kRows - 1) / kRows), width_(width),
        sums_(scratch.alloc("sums of row blocks", DType::kF32, {count_, width}).ptr<float>()) {
    parallel_for_dynamic(count_, [&](int64_t block) {
      float* sums = sums_ + block * width_;
      std::fill(sums, sums + width_, 0.0f);
      body(block * kRows, std::min(rows, (block + 1) * kRows), sums);
    });
  }

  // out[i] += total of column first + i.
  void add_to(float* out, int64_t first, int64_t count) const {
    for (int64_t block = 0; block < count_; ++block) {
      const float* sums = sums_ + block * width_ + first;
      for (int64_t i = 0; i < count; ++i) out[i] += sums[i];
    }
  }

 private:
  int64_t count_, width_;
  float* sums_;
};

}  // namespace m3
