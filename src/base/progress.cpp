#include "base/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace m3 {
namespace {

using Clock = std::chrono::steady_clock;

std::string format_scaled(double value, double step, const char* const* names, int num_names) {
  int at = 0;
  while (value >= step && at + 1 < num_names) {
    value /= step;
    ++at;
  }
  return at == 0 ? fmt::format("{:.0f}{}", value, names[at]) : fmt::format("{:.1f}{}", value, names[at]);
}

}  // namespace

std::string format_bytes(double bytes) {
  static const char* const names[] = {" B", " KiB", " MiB", " GiB", " TiB"};
  return format_scaled(bytes, 1024, names, 5);
}

std::string format_count(double value) {
  static const char* const names[] = {"", " K", " M", " B", " T"};
  return format_scaled(value, 1000, names, 5);
}

Progress::Progress(std::string what, int64_t total, std::string unit, Mode mode)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      mode_(mode),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      last_draw_(start_) {}

Progress::~Progress() { finish(); }

void Progress::update(int64_t done, const std::string& note) {
  done_ = done;
  note_ = note;
  if (mode_ == Mode::kOff || finished_) return;
  const auto now = Clock::now();
  const auto gap = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(10000);
  if (now - last_draw_ < gap) return;
  last_draw_ = now;
  draw(false);
}

void Progress::finish() {
  if (finished_) return;
  finished_ = true;
  if (mode_ == Mode::kOff || (!terminal_ && !drawn_)) return;
  draw(true);
}

void Progress::draw(bool last) {
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const double share = total_ > 0 ? std::min(1.0, static_cast<double>(done_) / total_) : 0.0;
  const double rate = seconds > 0 ? done_ / seconds : 0;
  const std::string speed = unit_ == "bytes" ? format_bytes(rate) : format_count(rate) + " " + unit_;
  std::string line = what_;
  if (terminal_) {
    constexpr int kWidth = 24;
    const int full = static_cast<int>(share * kWidth + 0.5);
    line += " [" + std::string(full, '#') + std::string(kWidth - full, '-') + "]";
  }
  line += fmt::format(" {:3.0f} %  {}/s", share * 100, speed);
  if (!last && rate > 0 && total_ > done_) line += fmt::format("  {:.0f} s left", (total_ - done_) / rate);
  if (!note_.empty()) line += "  " + note_;
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s%s", line.c_str(), last ? "\n" : "");
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

}  // namespace m3
