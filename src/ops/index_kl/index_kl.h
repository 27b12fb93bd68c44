// index_kl: the loss that teaches the index branch, its value and its gradients. Contract: msa.md §8.1-§8.4, §16.
//
//   teacher  Pt[i,r,j] = mean over h in r of exp(scale q[i,h].k[j,r] - LSE[i,h])      on the row's support
//   student  ln pi     = scale_x qi[i,r].ki[j] - LSE_x[i,r]                            on the same support
//   KL[i,r]  = sum_j Pt (ln Pt - ln pi)
//   dqi[i,r] = weight scale_x sum_j (pi - Pt) ki[j]        dki[j] = weight scale_x sum_i sum_r (pi - Pt) qi[i,r]
//
//   q_THD   [T, H, D] f32|bf16         k_SRD  [S, R, D] f32|bf16        lse_TH  fp32 [T, H], of the running stage
//   qi_TRX  [T, R, X] f32|bf16         ki_SX  [S, X]    f32|bf16        lists   ids (kBlocks) or absent (kFull)
//   dqi_TRX [T, R, X] f32|bf16         dki_SX [S, X]    f32|bf16
//   kl_RT, lse_x_RT   fp32 [R, T] or absent
//
// Support: kBlocks (sparse stage) or kFull (dense warm-up); others are refused. weight = lambda / (T_global R), so
// that cutting a batch changes nothing. The teacher and the support are constants: no gradient reaches q, k, LSE.
// Sequences may be left out (index_kl_plan): their rows of dqi and kl are 0, of lse_x -inf, and their keys get nothing.
// KL rows are not weighted. Packed batches only; fragments share key rows (dki sums over the sharers). Empty rows and
// rows with one visible key: KL = 0, no gradient (LSE_x of an empty row is -inf). Every element of the outputs is written.
// Deterministic, whatever the number of threads. The run allocates only the lists of a thread that say who reads which block.
#pragma once
#include <span>

#include "ops/common/msa_partials.h"
#include "tensor/device.h"

namespace m3 {

struct IndexKlInputs {
  Tensor q_THD, k_SRD, lse_TH, qi_TRX, ki_SX, lists;
};
struct IndexKlOutputs {
  Tensor dqi_TRX, dki_SX, kl_RT, lse_x_RT;
};

struct IndexKlPlan {
  MsaGeometry geometry;
  AttendSupport support;
  int64_t num_queries = 0, num_keys = 0;
  int64_t workspace_bytes = 0;
  int64_t thread_floats = 0;
  int num_threads = 0;
  MsaPieces pieces;  // of all groups together; a piece sums dki [num_keys, Xp]
};

// `takes_part` [num_seqs]: 0 leaves a sequence out; empty: all take part.
IndexKlPlan index_kl_plan(const MsaGeometry& geometry, const MsaBatch& batch, const AttendSupport& support,
                          std::span<const uint8_t> takes_part = {});

void index_kl(const IndexKlPlan& plan, const MsaBatch& batch, double weight, const IndexKlInputs& in,
              const IndexKlOutputs& out, void* workspace);

// The definition of right: plain loops in fp64. Allocates.
void index_kl_ref(const MsaGeometry& geometry, const MsaBatch& batch, const AttendSupport& support, double weight,
                  const IndexKlInputs& in, const IndexKlOutputs& out);

}  // namespace m3
