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

}  // namespace m3
