// Values made ahead by worker threads, handed out in order: the consumer sees the same sequence for any number
// of workers. make(position) must be a function of the position alone and is called from several threads.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/threads.h"

namespace m3::data {

template <typename T>
class Prefetcher {
 public:
  // Begins at `position`; at most `depth` values wait. workers 0: made on demand by the caller.
  Prefetcher(std::function<T(int64_t)> make, int64_t position, int workers, int64_t depth)
      : make_(std::move(make)), next_out_(position), next_in_(position), depth_(depth) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Prefetcher() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    room_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The value at position(), which then moves on. An exception of make() for it is thrown here, and the
  // position moves on too.
  T next() {
    if (threads_.empty()) return make_(next_out_++);
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [this] { return made_.count(next_out_) > 0; });
    Made made = std::move(made_.extract(next_out_).mapped());
    ++next_out_;
    lock.unlock();
    room_.notify_all();
    if (made.error) std::rethrow_exception(made.error);
    return std::move(*made.value);
  }
  int64_t position() const { return next_out_; }  // of the next value handed out

 private:
  struct Made {
    std::optional<T> value;
    std::exception_ptr error;
  };
  void work() {
    const SerialScope serial;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      room_.wait(lock, [this] { return stop_ || next_in_ < next_out_ + depth_; });
      if (stop_) return;
      const int64_t position = next_in_++;
      lock.unlock();
      Made made;
      try {
        made.value.emplace(make_(position));
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      made_.emplace(position, std::move(made));
      ready_.notify_all();
    }
  }

  std::function<T(int64_t)> make_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable room_, ready_;
  int64_t next_out_, next_in_, depth_;
  std::map<int64_t, Made> made_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace m3::data
