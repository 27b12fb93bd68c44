// Device side of msa_types.h: which sequence a query row belongs to, and where its keys lie.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "ops/common/msa_types.h"

namespace m3 {

struct MsaSequence {
  int32_t index = 0;           // n
  int32_t q_begin = 0, q_len = 0;
  int32_t k_begin = 0;         // packed: first key row
  int32_t k_len = 0;
  int32_t first_position = 0;  // of the first query row; negative for empty rows
};

__device__ __forceinline__ MsaSequence msa_sequence(const MsaBatch& batch, int n) {
  MsaSequence s;
  s.index = n;
  s.q_begin = batch.cu_q[n];
  s.q_len = batch.cu_q[n + 1] - s.q_begin;
  if (batch.layout == KvLayout::kPaged) {
    s.k_len = batch.seq_lens[n];
  } else {
    s.k_begin = batch.cu_k[batch.lead != nullptr ? batch.lead[n] : n];
    s.k_len = batch.cu_k[n + 1] - s.k_begin;
  }
  s.first_position = s.k_len - s.q_len;
  return s;
}

// Last n with begins[n] <= value; begins ascends, begins[0] <= value < begins[num].
__device__ __forceinline__ int msa_find(const int32_t* begins, int num, int32_t value) {
  int low = 0, high = num;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begins[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Key row of the first token of block b: of [S] (packed) or of [P * B] (paged; block = page).
__device__ __forceinline__ int64_t msa_block_row(const MsaBatch& batch, const MsaSequence& s, int b, int block) {
  if (batch.layout == KvLayout::kPaged) return int64_t{batch.page_table[s.index * batch.max_pages + b]} * block;
  return int64_t{s.k_begin} + int64_t{b} * block;
}

// Element offset of head r, key `offset` of block b in k or v of shape [S, R, D] or [P, R, B, D].
__device__ __forceinline__ int64_t msa_kv_offset(const MsaBatch& batch, const MsaSequence& s, int b, int offset, int r,
                                                 int groups, int block, int dim) {
  if (batch.layout == KvLayout::kPaged) {
    const int64_t page = batch.page_table[s.index * batch.max_pages + b];
    return ((page * groups + r) * block + offset) * dim;
  }
  return ((int64_t{s.k_begin} + int64_t{b} * block + offset) * groups + r) * dim;
}

__device__ __forceinline__ float msa_load(const float* x) { return *x; }
__device__ __forceinline__ float msa_load(const __nv_bfloat16* x) { return __bfloat162float(*x); }
__device__ __forceinline__ void msa_store(float* x, float value) { *x = value; }
__device__ __forceinline__ void msa_store(__nv_bfloat16* x, float value) { *x = __float2bfloat16(value); }

// A score as ranking sees it (msa.md §2): NaN is -inf, -0 is +0.
__device__ __forceinline__ float msa_canonical_score(float z) { return fmaxf(z, -INFINITY) + 0.0f; }

}  // namespace m3
