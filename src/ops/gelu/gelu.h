// Exact GELU (model.md §8.2), computed in fp32, rounded once:  y = 0.5 · x · (1 + erf(x / √2))
//   x, y  any shape, equal; f32 | bf16; y may alias x if of the same type
// Scratch: none. Elementwise.
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void gelu(const Tensor& x, const Tensor& y, Stream stream = {});

void gelu_ref(const Tensor& x, const Tensor& y);

// dx = dy · (Φ(x) + x · φ(x)), Φ and φ of the unit normal. dx may alias x or dy if of the same type.
void gelu_backward(const Tensor& x, const Tensor& dy, const Tensor& dx, Stream stream = {});
void gelu_backward_ref(const Tensor& x, const Tensor& dy, const Tensor& dx);

}  // namespace m3
