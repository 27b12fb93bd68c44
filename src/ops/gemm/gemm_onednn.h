// The alternative to our own kernels for large products: oneDNN, behind gemm_run's problem.
#pragma once
#include "ops/gemm/gemm_kernel.h"

namespace m3 {

// Computes p and returns true if oneDNN is built in and p is one that it does well: at least 64 rows, no picked rows,
// both operands f32, or both bf16 on a CPU with AVX-512 BF16 (older CPUs: version 2.6 throws or is slow, dependencies.md
// §3). The same operands and thread count give the same bits; other numbers of rows or threads need not.
bool onednn_gemm(const GemmProblem& problem);

}  // namespace m3
