// Small helpers on whole tensors, any shape; computed in fp32, rounded once. f32 | bf16 in any mix.
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void add(const Tensor& a, const Tensor& b, const Tensor& y,
         Stream stream = {});                                     // y = a + b; y may alias a or b
void cast(const Tensor& x, const Tensor& y, Stream stream = {});  // y = x in y's type
void fill_zero(const Tensor& y, Stream stream = {});              // of any type

}  // namespace m3
