// Embedding rows (model.md §4, §9).
//   ids_T [T] i32, 0 <= id < V (checked)     table_VC [V, C] f32 | bf16     y_TC [T, C] f32 | bf16
//   rows_N [N] i32, distinct rows of x_TC that media features features_NC replace; any f32 | bf16 mix
// Scratch: none. No scaling anywhere.
#pragma once
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace m3 {

void embed(const Tensor& ids_T, const Tensor& table_VC, const Tensor& y_TC, Stream stream = {});

// x_TC[rows[n]] = features_NC[n]
void embed_replace(const Tensor& rows_N, const Tensor& features_NC, const Tensor& x_TC,
                   Stream stream = {});

// y_NC[n] = x_TC[rows[n]]: the rows whose logits are wanted; also the backward of embed_replace.
void gather_rows(const Tensor& rows_N, const Tensor& x_TC, const Tensor& y_NC, Stream stream = {});

// dtable_VC[ids[t]] += dy_TC[t], dtable f32; tokens of one id are added in ascending order, whatever the threads.
// Tokens with skip[t] != 0 (media placeholders, whose rows were replaced) add nothing; skip_T [T] u8 may be absent.
void embed_backward(const Tensor& ids_T, const Tensor& skip_T, const Tensor& dy_TC,
                    const Tensor& dtable_VC, Stream stream = {});
void embed_backward_ref(const Tensor& ids_T, const Tensor& skip_T, const Tensor& dy_TC,
                        const Tensor& dtable_VC);

}  // namespace m3
