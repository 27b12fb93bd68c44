// The order of documents: a pure function of (seed, epoch, position), the same for any number of workers and
// ranks (training.md §6). Documents are shuffled window by window: neighbours in a shard are read near one
// another, and the whole epoch is never permuted in memory.
#pragma once
#include <cstdint>
#include <vector>

namespace m3::data {

class ShuffledOrder {
 public:
  static constexpr int64_t kWindow = 8192;
  ShuffledOrder(int64_t num_documents, uint64_t seed, int64_t window = kWindow);

  // The document at `position` of the endless sequence: epoch = position / num_documents, and within an epoch
  // every document once. Remembers the last window; one thread at a time.
  int64_t document(int64_t position);
  int64_t num_documents() const { return num_documents_; }

 private:
  void load_epoch(int64_t epoch);
  void load_window(int64_t place);

  int64_t num_documents_, window_;
  uint64_t seed_;
  int64_t epoch_ = -1, place_ = -1;
  std::vector<int64_t> windows_, starts_;  // windows in the epoch's order, and where each begins in it
  std::vector<int64_t> order_;             // documents of the window at place_
};

}  // namespace m3::data
