// Progress on long work, on stderr: one line redrawn at most ten times a second on a terminal, a plain
// line every ten seconds elsewhere. Thread-compatible: one thread calls it.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace m3 {

class Progress {
 public:
  enum class Mode { kAuto, kOff };
  // "loading  [#####-----]  50 %  1.2 GB/s": unit "bytes" prints binary sizes, others as they are.
  Progress(std::string what, int64_t total, std::string unit, Mode mode = Mode::kAuto);
  ~Progress();
  void update(int64_t done, const std::string& note = {});
  void finish();  // draws the last state and ends the line; the destructor calls it

 private:
  void draw(bool last);

  std::string what_, unit_, note_;
  int64_t total_, done_ = 0;
  Mode mode_;
  bool terminal_, finished_ = false, drawn_ = false;
  std::chrono::steady_clock::time_point start_, last_draw_;
};

std::string format_bytes(double bytes);  // "12.3 MiB"
std::string format_count(double value);  // "427.0 B", "4.1 M"

}  // namespace m3
