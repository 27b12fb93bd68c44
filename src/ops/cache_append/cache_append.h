// cache_append: writes the keys, values and index keys of the new tokens into their pages, before
// selection and attention of the same step. Contract: msa.md §6.
//
//   k_TRD, v_TRD  [T, R, D] f32|bf16     ki_TX  [T, X] f32|bf16, absent where a layer has no index branch
//   k_PRBD, v_PRBD  [P, R, B, D]         x_PBX  [P, B, X], absent likewise; f32|bf16 (rounded once)
//
// Row i of sequence n goes to position L_k - L_q + i (seq_lens counts the new tokens). Rows of unused
// slots (seq_len = 0) are not written. Nothing else in a page is touched; two sequences must not
// append to one page (copy it first).
#pragma once
#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

void cache_append(const MsaBatch& batch, const Tensor& k_TRD, const Tensor& v_TRD, const Tensor& ki_TX,
                  const Tensor& k_PRBD, const Tensor& v_PRBD, const Tensor& x_PBX, Stream stream = {});

}  // namespace m3
