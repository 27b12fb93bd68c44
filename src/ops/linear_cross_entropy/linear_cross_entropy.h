// LM head and cross-entropy in one operation that never holds the logits of the batch (training.md §3, §14).
//   z = h_n · Wᵀ    logZ_n = log Σ_v e^z_v    loss_n = logZ_n − z_target        over v < num_ids
//   total_n = loss_n + z_weight · logZ_n²
//   dz = factor · weight_n · (softmax(z) · (1 + 2 · z_weight · logZ) − onehot(target))     dh_n = dz · W    dW += dzᵀ · h
//   h_NC [N, C] f32 | bf16: only the rows that have a target (gather_rows)     w_VC [V, C] f32 | bf16
//   targets_N [N] i32, 0 <= id < num_ids (checked)     loss_N, logz_N [N] f32
//   weights_N [N] f32 or absent (1): how much row n counts in the gradient     argmax_N [N] i32 or absent: the id of the
//   largest z (ties: the lower id)
//   dh_NC [N, C] f32 | bf16, written; dw_VC [V, C] f32, added to; both absent: value only
// factor is 1 / (number of targets of the global batch), times any loss scale: gradients are sums divided once.
// Rows go in chunks of at most 32 MiB of fp32 logits, but at least 64 rows. If h and W are bf16, dz is rounded to bf16
// before it is multiplied, as every gradient of bf16 training is; else it stays fp32. Sums over v: fp32 in blocks of
// 1024, the blocks in fp64.
// Scratch: linear_cross_entropy_scratch_bytes. Deterministic, whatever the threads.
#pragma once
#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

struct LinearCrossEntropy {
  int64_t num_ids =
      0;  // ids from here on have no token: left out of the softmax; 0: all V have one
  float z_weight = 0.0f;  // zeta of training.md §3
  float factor = 1.0f;
  Tensor weights_N = {};
  Tensor argmax_N = {};  // written
};

void linear_cross_entropy(const Tensor& h_NC, const Tensor& w_VC, const Tensor& targets_N,
                          const LinearCrossEntropy& config, const Tensor& loss_N,
                          const Tensor& logz_N, const Tensor& dh_NC, const Tensor& dw_VC,
                          Arena& scratch, Stream stream = {});

int64_t linear_cross_entropy_scratch_bytes(int64_t num_rows, int64_t vocab);

void linear_cross_entropy_ref(const Tensor& h_NC, const Tensor& w_VC, const Tensor& targets_N,
                              const LinearCrossEntropy& config, const Tensor& loss_N,
                              const Tensor& logz_N, const Tensor& dh_NC, const Tensor& dw_VC);

}  // namespace m3
