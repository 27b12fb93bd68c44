// Gemma RMSNorm (model.md §4.1), computed in fp32, rounded once:
//   y = x · rsqrt(mean(x²) + eps) · (1 + w)          the op adds the 1; w is the stored weight
//   x_TC [T, C] f32 | bf16    w_C [C] f32 | bf16    y_TC [T, C] f32 | bf16, may alias x if of the same type
// Scratch: none. Rows are independent of each other, bit for bit.
#pragma once
#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void rmsnorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps,
             Stream stream = {});

// x_TC += delta_TC (rounded to x's type), then y = rmsnorm(x): the residual connection in one pass.
void add_rmsnorm(const Tensor& x_TC, const Tensor& delta_TC, const Tensor& w_C, const Tensor& y_TC,
                 float eps, Stream stream = {});

void rmsnorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps);

// Gradients, all in fp32: with n = x · rsqrt(mean(x²) + eps) and g = dy · (1 + w),
//   dx = (g − n · mean(g · n)) · rsqrt(mean(x²) + eps)          dw_C += Σ_t dy · n
//   x_TC is the input of the norm (after the residual); dx_TC f32 | bf16, dx = or, with accumulate, dx += ; may alias dy.
//   dw_C f32. Sums over tokens run in a fixed order of blocks of 64, whatever the threads.
// Scratch: rmsnorm_backward_scratch_bytes.
void rmsnorm_backward(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                      const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C, Arena& scratch,
                      Stream stream = {});
int64_t rmsnorm_backward_scratch_bytes(int64_t num_tokens, int64_t hidden);
void rmsnorm_backward_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                          const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C);

}  // namespace m3
