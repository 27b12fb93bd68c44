// dsa_kl: the loss that teaches the lightning indexer of the DSA baseline, its value and its
// gradients. Contract: msa.md §16.
//
//   teacher  Pt[i,j]  = mean over all H heads of exp(scale q[i,h].k[j,h/G] - LSE[i,h]),
//                       on the row's token list
//   student  I[i,j]   = sum_a w[i,a] ReLU(u[i,a,j]) / sqrt(A X),  u = qx[i,a].kx[j];
//                       pi = softmax_j I
//   KL[i]    = sum_j Pt (ln Pt - ln pi)          dI = weight (pi - Pt)
//   dqx[i,a] = sum_j dI w 1[u > 0] kx[j] / sqrt(A X)
//   dkx[j]   = sum_i sum_a dI w 1[u > 0] qx[i,a] / sqrt(A X)
//   dw[i,a]  = sum_j dI ReLU(u) / sqrt(A X)
//
//   q_THD [T, H, D], k_SRD [S, R, D], qx_TAX [T, A, X], kx_SX [S, X]  f32|bf16
//   lse_TH [T, H], w_TA [T, A]                                        fp32
//   tokens_TK                            int32 [T, budget] as dsa_select gives them
//   dqx_TAX, dkx_SX  f32|bf16            dw_TA, kl_T  fp32 or absent
//
// weight = lambda / T_global. Teacher and lists are constants. Packed batches only. Sequences may
// be left out: their rows of dqx, dw and kl are 0 and their keys get nothing. Every element of the
// outputs is written. Deterministic, whatever the number of threads; the run allocates only lists
// of pieces.
#pragma once
#include <span>

#include "ops/common/msa_partials.h"

namespace m3 {

struct DsaKlInputs {
  Tensor q_THD, k_SRD, lse_TH, qx_TAX, kx_SX, w_TA, tokens_TK;
};
struct DsaKlOutputs {
  Tensor dqx_TAX, dkx_SX, dw_TA, kl_T;
};

struct DsaKlPlan {
  MsaGeometry geometry;  // of the main branch; index_dim is X
  int index_heads = 0;   // A
  int64_t budget = 0;
  int64_t num_queries = 0, num_keys = 0;
  int64_t workspace_bytes = 0;
  int64_t thread_floats = 0;
  int num_threads = 0;
  MsaPieces pieces;  // a piece sums dkx [num_keys, Xp]
};

DsaKlPlan dsa_kl_plan(const MsaGeometry& geometry, int index_heads, int64_t budget,
                      const MsaBatch& batch, std::span<const uint8_t> takes_part = {});

void dsa_kl(const DsaKlPlan& plan, const MsaBatch& batch, double weight, const DsaKlInputs& in,
            const DsaKlOutputs& out, void* workspace);

// The definition of right: plain loops in fp64. Allocates.
void dsa_kl_ref(const MsaGeometry& geometry, const MsaBatch& batch, double weight,
                const DsaKlInputs& in, const DsaKlOutputs& out);

}  // namespace m3
