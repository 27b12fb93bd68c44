// Arenas own memory. A named arena reserves its size once; tensors are carved from it and freed
// together (reset) or back to a mark. Host arenas are anonymous maps: pages that nobody touches cost
// nothing, so a plan may be generous. Not thread-safe.
//
// MemoryPlan collects what a program will hold, by name, before anything is allocated, and prints it:
//   weights (mapped)        540.1 MiB
//   KV cache                212.0 MiB
//   activations              96.3 MiB
//   total                   848.4 MiB
#pragma once
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace m3 {

class MemoryPlan {
 public:
  void add(std::string name, int64_t bytes);
  int64_t total_bytes() const;
  std::string str() const;
  struct Entry {
    std::string name;
    int64_t bytes;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

class Arena {
 public:
  static constexpr int64_t kAlignment = 256;  // covers cache lines, AVX-512 and TMA (128 B)

  Arena() = default;
  Arena(std::string name, int64_t capacity_bytes, Device device = {});
  // An arena without memory: its tensors must not be touched, only their sizes count. Running the
  // code that carves an arena on one of these gives the bytes to plan (peak_bytes).
  static Arena measuring(std::string name);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Contents are undefined (zero on first use of a page). Throws with the arena's name, the bytes
  // wanted and the bytes left.
  Tensor alloc(const char* what, DType dtype, Shape shape);
  void* alloc_bytes(const char* what, int64_t bytes);

  int64_t mark() const { return used_; }
  void reset(int64_t mark = 0) { used_ = mark; }

  int64_t used_bytes() const { return used_; }
  int64_t peak_bytes() const { return peak_; }
  int64_t capacity_bytes() const { return capacity_; }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  Device device_;
  char* base_ = nullptr;
  int64_t capacity_ = 0, used_ = 0, peak_ = 0;
  bool owns_ = false;
};

// Frees everything carved since its construction.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.reset(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  int64_t mark_;
};

int64_t peak_resident_bytes();     // of this process, since its start or the last reset
void reset_peak_resident_bytes();  // to what is resident now; without effect where the kernel does not offer it
int64_t resident_bytes();          // of this process, now
int64_t available_memory_bytes();  // that a process of this machine can still take (MemAvailable)

}  // namespace m3
