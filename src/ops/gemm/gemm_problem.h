// For operations that hand lists of products to gemm_run: a checked GemmProblem from tensors.
#pragma once
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_kernel.h"

namespace m3 {

// As gemm(); with x_rows, row m of y comes from row x_rows[m] of x, and y tells how many there are.
GemmProblem gemm_problem(const Tensor& x_MK, const int32_t* x_rows, const Weight& w_NK,
                         const Tensor& bias_N, const Tensor& y_MN, const GemmOptions& options = {});

}  // namespace m3
