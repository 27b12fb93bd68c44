// Matrix products with weights as the checkpoint stores them (model.md §2: [out, in]).
//   gemm               y_MN  = x_MK · W_NKᵀ (+ bias_N)         forward of a linear layer
//   gemm_shared_input  several of them with the same x, in one parallel region (q, k, v, ...)
//   gemm_backward_x    dx_MK = dy_MN · W_NK
//   gemm_backward_w    dW_NK (+)= dy_MNᵀ · x_MK
//
//   x, dy, dx, y   f32 | bf16, each on its own      bias  f32 | bf16 | absent
//   W              f32 | bf16 | e4m3 with E8M0 scales (MXFP8, model.md §11.1)      dW  f32
//
// Arithmetic: sums in fp32. If x is f32, or the CPU has no bf16 dot product, operands are widened (exactly) and
// multiplied in fp32; if x is bf16, W is bf16 or e4m3 and the CPU has AVX-512 BF16, products of bf16 pairs
// are summed in fp32 by that instruction. y is rounded once, after the bias.
// Aliasing: y must not overlap x or W. M, N or K may be 0 (K = 0 gives the bias, or 0).
// Determinism: the same operands give the same bits, whatever the number of threads.
// Batch invariance (GemmOptions): row m of y depends on row m of x only, bit for bit: not on M, not on the other rows.
//   Our kernels have both: one fixed order of the sum over K on each instruction set. Without batch_invariant, oneDNN
//   takes the products it is good at (gemm_onednn.h); its bits may change with M and with the number of threads.
#pragma once
#include <span>

#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

// A matrix in its stored form; a view, usually into the memory-mapped checkpoint.
struct Weight {
  Tensor values;  // [N, K] f32 | bf16 | e4m3
  Tensor scales;  // [N, K / 32] u8 (E8M0), with e4m3 only: value = e4m3 · 2^(scale − 127)

  Weight() = default;
  Weight(Tensor w_NK) : values(w_NK) {}  // NOLINT: a plain matrix is a weight
  Weight(Tensor w_NK, Tensor scales_NB) : values(w_NK), scales(scales_NB) {}

  bool defined() const { return values.defined(); }
  int64_t num_out() const { return values.dim(0); }
  int64_t num_in() const { return values.dim(1); }
};

struct GemmOptions {
  bool batch_invariant =
      true;  // false: oneDNN may be used (training that need not be repeated to the bit)
  bool accumulate = false;  // y += x Wᵀ; y must be f32
};

// Scratch: gemm_scratch_bytes. All shapes are checked; a mismatch throws and names both.
void gemm(const Tensor& x_MK, const Weight& w_NK, const Tensor& bias_N, const Tensor& y_MN,
          const GemmOptions& options, Arena& scratch, Stream stream = {});

struct GemmOutput {
  Weight w_NK;
  Tensor bias_N;  // may be absent
  Tensor y_MN;
};
void gemm_shared_input(const Tensor& x_MK, std::span<const GemmOutput> outputs,
                       const GemmOptions& options, Arena& scratch, Stream stream = {});

void gemm_backward_x(const Tensor& dy_MN, const Weight& w_NK, const Tensor& dx_MK,
                     const GemmOptions& options, Arena& scratch, Stream stream = {});

// options.accumulate adds to dW_NK (and to db_N if it is given: the column sums of dy); both f32.
void gemm_backward_w(const Tensor& dy_MN, const Tensor& x_MK, const Tensor& dw_NK,
                     const Tensor& db_N, const GemmOptions& options, Arena& scratch,
                     Stream stream = {});

// Upper bound for any of the calls above with these sizes.
int64_t gemm_scratch_bytes(int64_t m, int64_t n, int64_t k);

// The definition of right: plain loops, sums over k ascending in fp64. Same contract, no scratch.
void gemm_ref(const Tensor& x_MK, const Weight& w_NK, const Tensor& bias_N, const Tensor& y_MN,
              bool accumulate);
void gemm_backward_x_ref(const Tensor& dy_MN, const Weight& w_NK, const Tensor& dx_MK,
                         bool accumulate);
void gemm_backward_w_ref(const Tensor& dy_MN, const Tensor& x_MK, const Tensor& dw_NK,
                         const Tensor& db_N, bool accumulate);

}  // namespace m3
