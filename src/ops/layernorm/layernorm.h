// LayerNorm of the vision tower (model.md §8.2), computed in fp32, rounded once:
//   y = (x − mean) · rsqrt(var + eps) · w + b          var is the biased variance
//   x_TC [T, C] f32 | bf16    w_C, b_C [C] f32 | bf16    y_TC [T, C] f32 | bf16, may alias x if of the same type
// Scratch: none. Rows are independent of each other, bit for bit.
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void layernorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC, float eps,
               Stream stream = {});

void layernorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC, float eps);

}  // namespace m3
