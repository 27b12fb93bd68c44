// AdamW on fp32 masters (training.md §10; the golden of tests/golden/README.md, training.json):
//   g ← g · grad_factor     m ← beta1 · m + (1 − beta1) · g     v ← beta2 · v + (1 − beta2) · g²
//   w ← w − lr · ((m / (1 − beta1^step)) / (√(v / (1 − beta2^step)) + eps) + weight_decay · w)
//   w, g f32; m, v f32 | bf16 (rounded after the update); copy: bf16 weights for the next forward, or absent
// Any shape, all equal. Elementwise, so sharding and threads do not change a bit.
//
// Clipping works on groups (backbone, vision, indexer), each with its own norm:
//   sum of grad_sum_of_squares over the group's tensors → clip_factor → grad_factor of each of its tensors
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

struct AdamW {
  float lr = 0;  // of this tensor: the schedule's times the group's factor
  float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
  float weight_decay = 0;
  float grad_factor = 1;  // clip_factor, and the division by the loss scale if there is one
  int64_t step = 1;       // of this update, from 1
};

void adamw(const Tensor& w, const Tensor& g, const Tensor& m, const Tensor& v, const Tensor& copy,
           const AdamW& config, Stream stream = {});
void adamw_ref(const Tensor& w, const Tensor& g, const Tensor& m, const Tensor& v,
               const Tensor& copy, const AdamW& config);

// Σ g², in fp64 over fixed blocks of 4096 elements in order, whatever the threads. NaN and infinity come through.
double grad_sum_of_squares(const Tensor& g);

// min(1, clip / norm); clip <= 0: no clipping (1). Throws on a norm that is not finite: such a step must not be taken.
float clip_factor(double norm, double clip);

}  // namespace m3
