// Which instruction set the fast CPU paths use, decided once. M3_CPU (portable, avx2, avx512,
// avx512bf16) lowers the choice, for tests and comparisons; asking for more than the CPU has is an
// error. avx512bf16 implies avx512, which implies avx2 (with FMA and F16C).
#pragma once

namespace m3 {

enum class CpuIsa { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

CpuIsa cpu_isa();           // the set in use
CpuIsa cpu_isa_detected();  // the best this CPU and operating system offer
void cpu_isa_override(CpuIsa isa);  // tests: must not exceed cpu_isa_detected()
const char* cpu_isa_name(CpuIsa isa);

// Whether kernels should take vdpbf16ps, where they have it, rather than widen to fp32. On AMD it does twice the work
// of an fp32 FMA (Zen 4: 235 against 117 GFLOP/s a core); on Intel half of it (Xeon with AMX, 2026-11-30: 86 against 178).
// Asking for avx512bf16 by M3_CPU or cpu_isa_override takes it everywhere.
bool cpu_bf16_dot_preferred();

}  // namespace m3
