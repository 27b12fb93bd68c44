// Work items of unequal cost over a fixed number of workers, each with its own scratch memory.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/threads.h"

namespace m3 {

// Calls body(item, worker) for every item in [0, count), worker in [0, num_workers). Items are taken
// in ascending order by whoever is free: results must not depend on who that is. Does not allocate.
template <typename Body>
void msa_for_each_item(int64_t count, int num_workers, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count;
    const Body& body;
  } shared{{}, count, body};
  // One reference is captured, which std::function holds without allocating.
  parallel_for(std::min<int64_t>(num_workers, count), [&shared](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = shared.next++; i < shared.count; i = shared.next++) shared.body(i, static_cast<int>(worker));
    }
  });
}

// Carves arrays out of a workspace; the same calls with a null base measure it.
class MsaCarver {
 public:
  explicit MsaCarver(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    const int64_t at = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace m3
