// Gemma RMSNorm (model.md §4.1), computed in fp32, rounded once:
//   y = x · rsqrt(mean(x²) + eps) · (1 + w)          the op adds the 1; w is the stored weight
//   x_TC [T, C] f32 | bf16    w_C [C] f32 | bf16    y_TC [T, C] f32 | bf16, may alias x if of the same type
// Scratch: none. Rows are independent of each other, bit for bit.
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void rmsnorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps, Stream stream = {});

// x_TC += delta_TC (rounded to x's type), then y = rmsnorm(x): the residual connection in one pass.
void add_rmsnorm(const Tensor& x_TC, const Tensor& delta_TC, const Tensor& w_C, const Tensor& y_TC, float eps,
                 Stream stream = {});

void rmsnorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps);

}  // namespace m3
