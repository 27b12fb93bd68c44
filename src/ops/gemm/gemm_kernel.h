// The product all entry points reduce to, as plain data, and the kernels that compute pieces of it. Other
// operations that multiply many small matrices at once (moe_experts) hand a list of problems to gemm_run.
//   c[m, n] = Σ_k a[m, k] · b[n, k]  (+ bias[n])  (+ c[m, n])
#pragma once
#include <cstdint>
#include <span>

namespace m3 {

enum class GemmType : uint8_t { kF32, kBf16, kE4m3 };

struct GemmProblem {
  const void* a = nullptr;  // f32 | bf16: [m, k], or [k, m] if a_transposed
  const void* b = nullptr;  // f32 | bf16 | e4m3: [n, k], or [k, n] if b_transposed (not e4m3)
  const uint8_t* b_scales = nullptr;  // e4m3: [n, k / 32] E8M0
  const void* bias = nullptr;         // f32 | bf16
  void* c = nullptr;                  // f32 | bf16: [m, n]
  // Stored rows to use in place of rows 0, 1, ... of a (of b only if it is transposed); absent: all, in order.
  const int32_t* a_rows = nullptr;
  const int32_t* b_rows = nullptr;
  int64_t m = 0, n = 0, k = 0;
  GemmType a_type = GemmType::kF32, b_type = GemmType::kF32, bias_type = GemmType::kF32,
           c_type = GemmType::kF32;
  bool a_transposed = false, b_transposed = false;
  bool accumulate = false;  // c is f32
};

// Computes the problems in one parallel region. Row m of c depends on row m of a only, bit for bit, whatever
// the shapes of the list and the number of threads. No scratch: each thread packs into 0.7 MB of its stack.
void gemm_run(std::span<const GemmProblem> problems);

// ---- what follows is between gemm_run.cpp and the kernel files

// Sums over k are cut into blocks of kGemmBlockK; each block is summed in lanes, the lanes in a fixed tree,
// the blocks in ascending order. Every path keeps this order, so it is part of the result.
inline constexpr int kGemmBlockK = 512;
// Up to this many rows, weights are read straight from memory instead of being packed for reuse: measured equal at
// about 48 rows of bf16 weights (Zen 3, AVX2, November 2026).
inline constexpr int kGemmMaxRowsM = 32;
// Largest piece of c of one call of `block`: a multiple of every tile height, and of 16.
inline constexpr int kGemmBlockM = 144, kGemmBlockN = 512;

struct GemmKernel {
  // c[m0:m1, n0:n1]
  void (*block)(const GemmProblem& problem, int64_t m0, int64_t m1, int64_t n0, int64_t n1);
  // c[:, n0:n1] for m <= kGemmMaxRowsM and nothing transposed; n0 is a multiple of 4.
  void (*rows)(const GemmProblem& problem, int64_t n0, int64_t n1);
};

extern const GemmKernel kGemmPortable, kGemmAvx2, kGemmAvx512;
extern const GemmKernel kGemmAvx512Bf16;  // a is bf16, b is bf16 or e4m3

}  // namespace m3
