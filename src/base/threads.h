// Threads inside operators: OpenMP with static schedules, so that sums have a fixed order. The count
// is set once by the program (--threads, else the CPUs this process may use); without OpenMP
// everything runs on the calling thread.
#pragma once
#include <cstdint>
#include <functional>

namespace m3 {

void set_num_threads(int count);  // count <= 0: the CPUs of the affinity mask
int num_threads();                // of a parallel region that this thread would start

// Calls body(begin, end) on contiguous pieces that cover [0, count), one per thread, statically.
void parallel_for(int64_t count, const std::function<void(int64_t begin, int64_t end)>& body);

// Calls body(i) for every i in [0, count); threads take the next i when free. For items of unequal
// cost whose results do not depend on the order.
void parallel_for_dynamic(int64_t count, const std::function<void(int64_t i)>& body);

// While it lives, parallel regions started by this thread run on it alone: for workers that are parallel
// among themselves (data loading).
class SerialScope {
 public:
  SerialScope();
  ~SerialScope();
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;

 private:
  bool previous_;
};

}  // namespace m3
