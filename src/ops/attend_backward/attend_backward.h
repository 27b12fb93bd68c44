// attend_backward: gradients of attend. Contract: msa.md §9, §16. Packed batches only (training).
//
//   D[i,h]  = sum_c dO O - dLSE[i,h]            P = exp(scale q.k - LSE)      dP = dO . v      dS = P (dP - D)
//   dq[i,h] = scale sum_j dS k[j,r]             dk[j,r] = scale sum_i sum_{h in r} dS q[i,h]
//   dv[j,r] = sum_i sum_{h in r} P dO[i,h]
//
//   q, o, do   [T, H, D] f32|bf16      k, v   [S, R, D] f32|bf16       lists  as attend takes them
//   lse        fp32 [T, H], of the forward pass                         dlse   fp32 [T, H] or absent
//   dq_THD     [T, H, D] f32|bf16      dk_SRD, dv_SRD  [S, R, D] f32|bf16
//
// ids, LSE and O are constants of the forward pass. Keys that nobody selected get zeros; empty rows get dq = 0;
// every element of the outputs is written. Sums are fp32 (fp16 would saturate at 65504), rounded once at the end.
// Outputs must not overlap inputs. Fragments (MsaBatch::lead) share key rows: dk, dv are sums over all sharers.
// Deterministic: fixed order of all sums, whatever the number of threads. The run allocates only the lists of a
// thread that say who reads which block.
#pragma once

#include "ops/common/msa_partials.h"
#include "tensor/device.h"

namespace m3 {

struct AttendBackwardInputs {
  Tensor q_THD, k_SRD, v_SRD, lists, o_THD, lse_TH, do_THD, dlse_TH;
};

struct AttendBackwardPlan {
  MsaGeometry geometry;
  AttendSupport support;
  int64_t num_queries = 0, num_keys = 0;
  int64_t workspace_bytes = 0;  // alignment: Arena::kAlignment
  int64_t thread_floats = 0;    // scratch of one thread
  int num_threads = 0;
  MsaPieces pieces;             // by group; a piece sums dk [num_keys, Dp], then dv [num_keys, Dp]
};

AttendBackwardPlan attend_backward_plan(const MsaGeometry& geometry, const MsaBatch& batch,
                                        const AttendSupport& support);

void attend_backward(const AttendBackwardPlan& plan, const MsaBatch& batch, const AttendBackwardInputs& in,
                     const Tensor& dq_THD, const Tensor& dk_SRD, const Tensor& dv_SRD, void* workspace);

// The definition of right: plain loops in fp64, rounded once at the end. Allocates.
void attend_backward_ref(const MsaGeometry& geometry, const MsaBatch& batch, const AttendSupport& support,
                         const AttendBackwardInputs& in, const Tensor& dq_THD, const Tensor& dk_SRD,
                         const Tensor& dv_SRD);

}  // namespace m3
