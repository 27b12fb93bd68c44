// Which pages of a KvCache are free. Not thread-safe: the engine's thread owns it.
#pragma once
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace m3 {

class PagePool {
 public:
  explicit PagePool(int64_t num_pages) : num_pages_(num_pages) {
    free_.reserve(num_pages);
    // Low ids are handed out first, so that memory is touched only as far as it is needed.
    for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
  }

  int64_t num_pages() const { return num_pages_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }

  int32_t take() {
    M3_CHECK(!free_.empty(), "all {} cache pages are in use", num_pages_);
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_back(int32_t page) { free_.push_back(page); }
  template <typename Visit>
  void for_each_free(const Visit& visit) const {
    for (const int32_t page : free_) visit(page);
  }

 private:
  int64_t num_pages_;
  std::vector<int32_t> free_;
};

}  // namespace m3
