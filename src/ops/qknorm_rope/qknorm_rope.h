// Per-head norm and rotary positions of q, k, index q and index k (model.md §4.2, §5.1) and of the vision tower (§8.3).
//
// Angles are made once per step and shared by all layers and heads (M = number of rotated pairs):
//   rope_angles     text: a[t, m] = pos_t · theta^(−2m / rotary_dim), the product and the power in fp32; M = rotary_dim / 2
//   rope_angles_3d  vision: axis_dim = 2·⌊⌊D / 3⌋ / 2⌋, f_m = theta^(−2m / axis_dim); the axes t, row, column one after
//                   another: M = 3 · axis_dim / 2
// Sine and cosine are those of the fp32 angle, rounded once to fp32.
//
// The rotation (NeoX pairs inside the first 2M dims; dims from 2M on pass through):
//   y[m] = x[m]·cos − x[m + M]·sin        y[m + M] = x[m + M]·cos + x[m]·sin
//
//   pos_T   [T] i32                    pos_T3  [T, 3] i32 (t, row, column)
//   cos_TM, sin_TM  [T, M] f32         x_THD, y_THD [T, H, D] f32 | bf16; y may alias x if of the same type
//   w_D     [D] f32 | bf16: Gemma norm over each head first (1 + w); fp32 throughout, rounded once
// Scratch: none. Rows are independent of each other, bit for bit.
#pragma once
#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void rope_angles(const Tensor& pos_T, double theta, const Tensor& cos_TM, const Tensor& sin_TM,
                 Stream stream = {});

int64_t rope_3d_pairs(int64_t head_dim);  // 39 for head dim 80
void rope_angles_3d(const Tensor& pos_T3, int64_t head_dim, double theta, const Tensor& cos_TM,
                    const Tensor& sin_TM, Stream stream = {});

void qknorm_rope(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM, const Tensor& sin_TM,
                 float eps, const Tensor& y_THD, Stream stream = {});
void rope(const Tensor& x_THD, const Tensor& cos_TM, const Tensor& sin_TM, const Tensor& y_THD,
          Stream stream = {});

// w_D absent: rotation only.
void qknorm_rope_ref(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM,
                     const Tensor& sin_TM, float eps, const Tensor& y_THD);

// Gradients: x_THD is the input of qknorm_rope (before the norm); the rotation is undone (its transpose), then the norm's
// gradient as in rmsnorm.h, over each head. dw_D [D] f32 += over all tokens and heads.
//   dy_THD, dx_THD f32 | bf16; dx may alias dy if of the same type
// Scratch: qknorm_rope_backward_scratch_bytes. Fixed order of sums, whatever the threads.
void qknorm_rope_backward(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM,
                          const Tensor& sin_TM, float eps, const Tensor& dy_THD,
                          const Tensor& dx_THD, const Tensor& dw_D, Arena& scratch,
                          Stream stream = {});
int64_t qknorm_rope_backward_scratch_bytes(int64_t num_tokens, int64_t head_dim);
void rope_backward(const Tensor& dy_THD, const Tensor& cos_TM, const Tensor& sin_TM,
                   const Tensor& dx_THD, Stream stream = {});
// w_D and dw_D absent: rotation only, x_THD is not read.
void qknorm_rope_backward_ref(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM,
                              const Tensor& sin_TM, float eps, const Tensor& dy_THD,
                              const Tensor& dx_THD, const Tensor& dw_D);

}  // namespace m3
