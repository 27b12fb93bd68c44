#include "base/cpu_features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace m3 {
namespace {

CpuIsa detect() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuIsa::kPortable;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return CpuIsa::kAvx2;
  }
  return __builtin_cpu_supports("avx512bf16") ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512;
#else
  return CpuIsa::kPortable;
#endif
}

CpuIsa from_environment() {
  const char* name = std::getenv("M3_CPU");
  if (name == nullptr) return cpu_isa_detected();
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (std::strcmp(name, cpu_isa_name(isa)) == 0) {
      M3_CHECK(isa <= cpu_isa_detected(), "M3_CPU={} asks for more than this CPU has ({})", name,
               cpu_isa_name(cpu_isa_detected()));
      return isa;
    }
  }
  M3_FAIL("M3_CPU={} is unknown; want portable, avx2, avx512 or avx512bf16", name);
}

std::atomic<bool> asked_by_name = std::getenv("M3_CPU") != nullptr;

std::atomic<CpuIsa>& current() {
  static std::atomic<CpuIsa> isa = from_environment();
  return isa;
}

}  // namespace

CpuIsa cpu_isa_detected() {
  static const CpuIsa isa = detect();
  return isa;
}

CpuIsa cpu_isa() { return current().load(std::memory_order_relaxed); }

void cpu_isa_override(CpuIsa isa) {
  M3_CHECK(isa <= cpu_isa_detected(), "instruction set {} is not available here (best: {})",
           cpu_isa_name(isa), cpu_isa_name(cpu_isa_detected()));
  current().store(isa, std::memory_order_relaxed);
  asked_by_name.store(true, std::memory_order_relaxed);
}

bool cpu_bf16_dot_preferred() {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_is("amd") != 0;
#else
  static const bool fast = false;
#endif
  return cpu_isa() == CpuIsa::kAvx512Bf16 && (fast || asked_by_name.load(std::memory_order_relaxed));
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable: return "portable";
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512bf16";
  }
  return "?";
}

}  // namespace m3
