// LayerNorm of the vision tower (model.md §8.2), computed in fp32, rounded once:
//   y = (x − mean) · rsqrt(var + eps) · w + b          var is the biased variance
//   x_TC [T, C] f32 | bf16    w_C, b_C [C] f32 | bf16    y_TC [T, C] f32 | bf16, may alias x if of the same type
// Scratch: none. Rows are independent of each other, bit for bit.
#pragma once
#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void layernorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC,
               float eps, Stream stream = {});

void layernorm_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC,
                   float eps);

// Gradients, all in fp32: with n = (x − mean) · rsqrt(var + eps) and g = dy · w,
//   dx = (g − mean(g) − n · mean(g · n)) · rsqrt(var + eps)     dw_C += Σ_t dy · n     db_C += Σ_t dy
//   dx_TC f32 | bf16, dx = or, with accumulate, dx += ; may alias dy. dw_C, db_C f32.
// Scratch: layernorm_backward_scratch_bytes. Fixed order of sums, whatever the threads.
void layernorm_backward(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                        const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C,
                        const Tensor& db_C, Arena& scratch, Stream stream = {});
int64_t layernorm_backward_scratch_bytes(int64_t num_tokens, int64_t hidden);
void layernorm_backward_ref(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                            const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C,
                            const Tensor& db_C);

}  // namespace m3
