// What this machine can do at best, measured: the denominator of every "share of the ceiling" in benchmarks.
// Loops of independent multiply-adds in registers, and reads of a buffer far larger than the caches, on
// num_threads() threads; the best of several runs.
#pragma once

namespace m3 {

struct MachineCeiling {
  double fp32_gflops = 0;
  double bf16_gflops = 0;  // products of bf16 pairs summed in fp32; 0: no such instruction
  double read_gb_s = 0;
};

MachineCeiling measure_machine_ceiling();  // takes about two seconds and 512 MiB

// One thread's loop: `rounds` rounds of independent multiply-adds. Returns the operations done (a multiply-add
// counts two); the sum keeps the compiler from dropping them.
namespace ceiling {
double fma_avx2(long rounds, float* sum);
double fma_avx512(long rounds, float* sum);
double dot_avx512bf16(long rounds, float* sum);
}  // namespace ceiling

}  // namespace m3
