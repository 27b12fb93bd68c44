// 8-bit copies of index keys: int8 codes with one scale per page (msa.md §12), beside the bf16
// keys.
//
//   codes_PBX  int8 [P, B, X]  code = round(key / scale), -127 .. 127; NaN gives 0, +-inf +-127
//   scale_P    fp32 [P]        largest finite |key| of the page / 127 (0 for a page of zeros)
//   error_P    fp32 [P]        at least max_j |scale * code_j - key_j| over the page's keys j
//   norm_P     fp32 [P]        at least max_j |key_j|
//
// Error and norm leave out keys with a NaN (their score counts as -inf) and are inf where a key
// holds an infinity: such pages are never certified. A page is written when its last token is:
// history pages are read only by queries of later blocks. X = B = 128 on the GPU.
#pragma once
#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

struct IndexKeys8 {
  int8_t* codes_PBX = nullptr;
  float* scale_P = nullptr;
  float* error_P = nullptr;
  float* norm_P = nullptr;
};

// Pages that the step of this batch completes: block b of a sequence where its new tokens hold
// position (b + 1) B - 1. On the GPU (device arrays of the batch; x bf16).
void index_keys8_append(const MsaBatch& batch, const void* x_PBX, const IndexKeys8& keys,
                        Stream stream);

// Pages first .. first + count - 1, whatever they hold: to convert a cache, and for tests.
void index_keys8_convert(const void* x_PBX, int64_t first, int64_t count, const IndexKeys8& keys,
                         Stream stream);

// The same on the host, from bf16 pages of x_PBX [P, B, X] (error and norm in fp64, rounded up).
void index_keys8_ref(const Tensor& x_PBX, int64_t first, int64_t count, const IndexKeys8& keys);

}  // namespace m3
