// SwiGLU-OAI (model.md §4.5), computed in fp32, rounded once:
//   g ← min(g, limit)   u ← clamp(u, −limit, limit)   a = (u + beta) · g · sigmoid(alpha · g)
//   gate_TF, up_TF, a_TF  [T, F] f32 | bf16; a may alias gate or up if of the same type
// Scratch: none. Elementwise.
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

struct SwigluOai {  // from the model's config, never assumed
  float alpha = 1.702f;
  float limit = 7.0f;
  float beta = 1.0f;
};

void swiglu_oai(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config,
                const Tensor& a_TF, Stream stream = {});

void swiglu_oai_ref(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config,
                    const Tensor& a_TF);

// Gradients. A value beyond its clamp gets none; one exactly at the limit does. With s = sigmoid(alpha · g):
//   dgate = da · (u + beta) · s · (1 + alpha · g · (1 − s))     dup = da · g · s
// dgate and dup may alias gate, up or da if of the same type.
void swiglu_oai_backward(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config,
                         const Tensor& da_TF, const Tensor& dgate_TF, const Tensor& dup_TF,
                         Stream stream = {});
void swiglu_oai_backward_ref(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config,
                             const Tensor& da_TF, const Tensor& dgate_TF, const Tensor& dup_TF);

}  // namespace m3
