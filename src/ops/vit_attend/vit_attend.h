// Attention of the vision tower (model.md §8.2, §8.4): bidirectional inside each segment, none across.
//   o_i = Σ_j softmax_j(scale · q_i · k_j) v_j         j over the segment of i; softmax in fp32
//   q_THD, k_THD, v_THD, o_THD  [T, H, D] f32 | bf16, one type; any D          lse_TH [T, H] f32, may be absent
//   cu_segments  n + 1 ascending offsets, first 0, last T; a segment may be empty
// Never builds an N x N matrix: keys are visited in tiles, memory is bounded by the tile.
// Scratch: vit_attend_scratch_bytes. A segment's result does not depend on the other segments, bit for bit.
#pragma once
#include <span>

#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void vit_attend(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD, std::span<const int32_t> cu_segments,
                float scale, const Tensor& o_THD, const Tensor& lse_TH, Arena& scratch, Stream stream = {});

int64_t vit_attend_scratch_bytes(int64_t num_tokens, int64_t num_heads, int64_t head_dim);

void vit_attend_ref(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD,
                    std::span<const int32_t> cu_segments, float scale, const Tensor& o_THD, const Tensor& lse_TH);

// Gradients. o_THD and lse_TH as the forward gave them; dq, dk, dv_THD [T, H, D] f32 | bf16, one type, written.
//   p_ij = e^(scale · q_i · k_j − lse_i)    δ_i = do_i · o_i    ds_ij = p_ij · (do_i · v_j − δ_i)
//   dq_i = scale · Σ_j ds_ij k_j    dk_j = scale · Σ_i ds_ij q_i    dv_j = Σ_i p_ij do_i
// Scratch: vit_attend_backward_scratch_bytes. Fixed order of sums, whatever the threads.
void vit_attend_backward(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD, const Tensor& o_THD,
                         const Tensor& lse_TH, const Tensor& do_THD, std::span<const int32_t> cu_segments, float scale,
                         const Tensor& dq_THD, const Tensor& dk_THD, const Tensor& dv_THD, Arena& scratch,
                         Stream stream = {});
int64_t vit_attend_backward_scratch_bytes(int64_t num_tokens, int64_t num_heads, int64_t head_dim);
void vit_attend_backward_ref(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD, const Tensor& do_THD,
                             std::span<const int32_t> cu_segments, float scale, const Tensor& dq_THD,
                             const Tensor& dk_THD, const Tensor& dv_THD);

}  // namespace m3
