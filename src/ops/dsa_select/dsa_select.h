// dsa_select: the token lists of the DSA baseline ("lightning indexer"). Contract: msa.md §16.
//
//   I[i,j]  = sum_a w[i,a] ReLU(qx[i,a] . kx[j]) / sqrt(A X)       A index query heads
//   tokens  = the `budget` largest visible I of a row (all if fewer), ties to the lower position, NaN
//             as -inf; one list per query, shared by all heads; nothing is forced
//
//   qx_TAX  [T, A, X] f32|bf16     kx  [S, X] or [P, B, X] f32|bf16     w_TA  fp32 [T, A]
//   tokens_TK  int32 [T, budget]   ascending positions, -1 behind
//
// Deterministic like index_select. run: no allocation, no waiting.
#pragma once
#include <vector>

#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

struct DsaGeometry {
  int heads = 0;      // A
  int index_dim = 0;  // X
  int block = 0;      // tokens of a page, for paged keys
  int64_t budget = 0; // tokens of a list
  void check() const;
};

struct DsaSelectPlan {
  DsaGeometry geometry;
  Device device;
  int64_t num_queries = 0;
  int64_t workspace_bytes = 0;
  int64_t max_k_len = 0;
  int num_threads = 0;
};

DsaSelectPlan dsa_select_plan(const DsaGeometry& geometry, const MsaBatch& batch, Device device = {});

void dsa_select(const DsaSelectPlan& plan, const MsaBatch& batch, const Tensor& qx_TAX, const Tensor& kx,
                const Tensor& w_TA, const Tensor& tokens_TK, void* workspace, Stream stream = {});

void dsa_select_ref(const DsaGeometry& geometry, const MsaBatch& batch, const Tensor& qx_TAX, const Tensor& kx,
                    const Tensor& w_TA, const Tensor& tokens_TK);

}  // namespace m3
