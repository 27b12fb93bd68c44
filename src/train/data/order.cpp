#include "train/data/order.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/rng.h"

namespace m3::data {
namespace {

// Fisher-Yates with its own stream of random numbers.
void shuffle(std::vector<int64_t>& values, uint64_t seed, uint64_t stream) {
  Philox random(seed, stream);
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}

}  // namespace

ShuffledOrder::ShuffledOrder(int64_t num_documents, uint64_t seed, int64_t window)
    : num_documents_(num_documents), window_(window), seed_(seed) {
  M3_CHECK(num_documents > 0 && window > 0, "an order of {} documents in windows of {}", num_documents, window);
}

void ShuffledOrder::load_epoch(int64_t epoch) {
  const int64_t num_windows = (num_documents_ + window_ - 1) / window_;
  windows_.resize(num_windows);
  std::iota(windows_.begin(), windows_.end(), 0);
  shuffle(windows_, seed_, static_cast<uint64_t>(epoch) << 32);
  starts_.clear();
  int64_t start = 0;
  for (int64_t w : windows_) {
    starts_.push_back(start);
    start += std::min(window_, num_documents_ - w * window_);
  }
  epoch_ = epoch;
  place_ = -1;
}

void ShuffledOrder::load_window(int64_t place) {
  const int64_t w = windows_[place];
  order_.resize(std::min(window_, num_documents_ - w * window_));
  std::iota(order_.begin(), order_.end(), w * window_);
  shuffle(order_, seed_, (static_cast<uint64_t>(epoch_) << 32) + static_cast<uint64_t>(w) + 1);
  place_ = place;
}

int64_t ShuffledOrder::document(int64_t position) {
  M3_CHECK(position >= 0, "position {}", position);
  if (position / num_documents_ != epoch_) load_epoch(position / num_documents_);
  const int64_t within = position % num_documents_;
  const int64_t place = std::upper_bound(starts_.begin(), starts_.end(), within) - starts_.begin() - 1;
  if (place != place_) load_window(place);
  return order_[within - starts_[place]];
}

}  // namespace m3::data
