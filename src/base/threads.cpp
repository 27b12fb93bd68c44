#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <mutex>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace m3 {
namespace {

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

int thread_count = available_cpus();
thread_local bool serial = false;  // SerialScope

int64_t num_workers(int64_t count) { return std::min<int64_t>(num_threads(), count); }

// Keeps the first exception of a parallel region; it is thrown again on the calling thread.
class FirstException {
 public:
  void keep() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!first_) first_ = std::current_exception();
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;  // guards first_
  std::exception_ptr first_;
};

}  // namespace

void set_num_threads(int count) {
  thread_count = count > 0 ? count : available_cpus();
#ifdef _OPENMP
  omp_set_num_threads(thread_count);
#endif
}

int num_threads() {
#ifdef _OPENMP
  return serial ? 1 : thread_count;
#else
  return 1;
#endif
}

void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t pieces = num_workers(count);
  if (pieces <= 1) {
    if (count > 0) body(0, count);
    return;
  }
  FirstException exception;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(pieces))
  for (int64_t piece = 0; piece < pieces; ++piece) {
    try {
      body(count * piece / pieces, count * (piece + 1) / pieces);
    } catch (...) {
      exception.keep();
    }
  }
  exception.rethrow();
}

void parallel_for_dynamic(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t workers = num_workers(count);
  if (workers <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  FirstException exception;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(workers))
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i);
    } catch (...) {
      exception.keep();
    }
  }
  exception.rethrow();
}

SerialScope::SerialScope() : previous_(serial) { serial = true; }
SerialScope::~SerialScope() { serial = previous_; }

}  // namespace m3
