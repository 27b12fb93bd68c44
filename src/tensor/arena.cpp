#include "tensor/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/progress.h"
#include "tensor/device.h"

namespace m3 {

void MemoryPlan::add(std::string name, int64_t bytes) { entries_.push_back({std::move(name), bytes}); }

int64_t MemoryPlan::total_bytes() const {
  int64_t total = 0;
  for (const Entry& entry : entries_) total += entry.bytes;
  return total;
}

std::string MemoryPlan::str() const {
  std::string text;
  auto line = [&](const std::string& name, int64_t bytes) {
    text += fmt::format("{:<32} {:>12}\n", name, format_bytes(static_cast<double>(bytes)));
  };
  for (const Entry& entry : entries_) line(entry.name, entry.bytes);
  line("total", total_bytes());
  return text;
}

Arena::Arena(std::string name, int64_t capacity_bytes, Device device)
    : name_(std::move(name)), device_(device), capacity_(capacity_bytes) {
  M3_CHECK(capacity_bytes >= 0, "arena {}: capacity {}", name_, capacity_bytes);
  if (capacity_bytes == 0) return;
  owns_ = true;
  if (!device.is_cpu()) {
    base_ = static_cast<char*>(device_malloc(capacity_bytes, device));
    return;
  }
  void* map = ::mmap(nullptr, capacity_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  M3_CHECK(map != MAP_FAILED, "arena {}: cannot reserve {} bytes: {}", name_, capacity_bytes,
           std::strerror(errno));
  base_ = static_cast<char*>(map);
}

Arena Arena::measuring(std::string name) {
  Arena arena;
  arena.name_ = std::move(name);
  arena.base_ = reinterpret_cast<char*>(kAlignment);  // so that its tensors count as defined
  arena.capacity_ = int64_t{1} << 62;
  return arena;
}

Arena::~Arena() {
  if (!owns_) return;
  if (device_.is_cpu()) {
    ::munmap(base_, capacity_);
  } else {
    device_free(base_, device_);
  }
}

Arena::Arena(Arena&& other) noexcept
    : name_(std::move(other.name_)),
      device_(other.device_),
      base_(std::exchange(other.base_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      peak_(other.peak_),
      owns_(std::exchange(other.owns_, false)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(device_, other.device_);
  std::swap(base_, other.base_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  std::swap(peak_, other.peak_);
  std::swap(owns_, other.owns_);
  return *this;
}

void* Arena::alloc_bytes(const char* what, int64_t bytes) {
  const int64_t begin = (used_ + kAlignment - 1) / kAlignment * kAlignment;
  M3_CHECK(bytes >= 0 && bytes <= capacity_ - begin, "arena {}: {} needs {} bytes, {} of {} are left",
           name_, what, bytes, std::max<int64_t>(0, capacity_ - begin), capacity_);
  used_ = begin + bytes;
  peak_ = std::max(peak_, used_);
  return base_ + begin;
}

Tensor Arena::alloc(const char* what, DType dtype, Shape shape) {
  return Tensor(alloc_bytes(what, shape.numel() * dtype_bytes(dtype)), dtype, shape, device_);
}

int64_t peak_resident_bytes() {
  struct rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * int64_t{1024};
}

void reset_peak_resident_bytes() { std::ofstream("/proc/self/clear_refs") << "5"; }

namespace {

// The number of kilobytes in the line "KEY:  N kB" of a file of /proc.
int64_t proc_bytes(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return std::stoll(line.substr(key.size())) * 1024;
  }
  M3_FAIL("{} has no line {}", path, key);
}

}  // namespace

int64_t resident_bytes() { return proc_bytes("/proc/self/status", "VmRSS:"); }

int64_t available_memory_bytes() { return proc_bytes("/proc/meminfo", "MemAvailable:"); }

}  // namespace m3
