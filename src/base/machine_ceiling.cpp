#include "base/machine_ceiling.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/cpu_features.h"
#include "base/threads.h"

namespace m3 {

namespace {

constexpr int kRepeats = 7;

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double fma_portable(long rounds, float* sum) {
  constexpr int kChains = 32;
  float acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = static_cast<float>(i);
  for (long round = 0; round < rounds; ++round) {
    for (float& value : acc) value = value * 0.999f + 0.001f;
  }
  for (const float value : acc) *sum += value;
  return 2.0 * kChains * static_cast<double>(rounds);
}

// Best rate of all threads together, in units of 1e9 operations a second.
double best_gflops(double (*loop)(long rounds, float* sum)) {
  const int threads = num_threads();
  std::vector<float> sums(threads, 0.0f);
  std::vector<double> operations(threads, 0.0);
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const double seconds = seconds_of([&] {
      parallel_for(threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) operations[i] = loop(4'000'000, &sums[i]);
      });
    });
    double total = 0;
    for (const double count : operations) total += count;
    best = std::max(best, total / seconds / 1e9);
  }
  return best;
}

double best_read_gb_s() {
  constexpr int64_t kWords = (int64_t{512} << 20) / 8;  // last-level caches of servers reach 300 MB
  std::vector<uint64_t> buffer(kWords, 1);
  std::atomic<uint64_t> sink = 0;
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const double seconds = seconds_of([&] {
      parallel_for(kWords, [&](int64_t begin, int64_t end) {
        uint64_t sums[8] = {};
        int64_t i = begin;
        for (; i + 8 <= end; i += 8) {
          for (int64_t j = 0; j < 8; ++j) sums[j] += buffer[i + j];
        }
        uint64_t sum = 0;
        for (const uint64_t value : sums) sum += value;
        sink += sum;
      });
    });
    best = std::max(best, kWords * 8 / seconds / 1e9);
  }
  return best;
}

}  // namespace

MachineCeiling measure_machine_ceiling() {
  MachineCeiling result;
  const CpuIsa isa = cpu_isa();
  result.fp32_gflops = best_gflops(isa >= CpuIsa::kAvx512  ? ceiling::fma_avx512
                                   : isa == CpuIsa::kAvx2 ? ceiling::fma_avx2
                                                          : fma_portable);
  if (isa == CpuIsa::kAvx512Bf16) result.bf16_gflops = best_gflops(ceiling::dot_avx512bf16);
  result.read_gb_s = best_read_gb_s();
  return result;
}

}  // namespace m3
