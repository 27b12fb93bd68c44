// index_select: which K blocks of keys every (query row, group) reads. Contract: msa.md §2-§4.
//
//   z[i,r,j] = qi[i,r] . ki[j]                     fp32 sums of the stored values, unscaled
//   M[i,r,b] = max of z over the visible keys of block b (NaN counts as -inf, -0 as +0)
//   ids      = forced blocks (`local` newest, `init` first) and the best others by (M descending,
//              block id ascending), min(K, visible blocks) in all
//
//   qi_TRX   [T, R, X]  f32|bf16      ki  [S, X] or [P, B, X]  f32|bf16 (need not be qi's type)
//   ids_RTK  int32 [R, T, K]          sel_scores_RTK  fp32 [R, T, K] or absent
//
// The ids of a row ascend and are followed by -1. sel_scores (aligned with ids): raw M; forced blocks
// +inf; unused slots -inf. Empty rows: -1 everywhere.
// Deterministic: ids are a pure function of the row's inputs, whatever the batch, the chunking of a
// prefill, the layout of the keys or the number of threads (one instruction sequence per path).
// Outputs must not overlap inputs. run: no allocation, no waiting, capturable.
#pragma once
#include <vector>

#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

enum class SelectOrder : uint8_t {
  kAscending,  // the contract of all consumers
  kScore,      // higher score first (forced blocks count as +inf), the own block last: for ablations of K
};

struct IndexSelectOptions {
  SelectOrder order = SelectOrder::kAscending;
  bool sel_scores = false;  // scores are written too, so every row is scored
};

// One piece of CPU work: query rows [q_begin, q_end) of a sequence against its blocks [b_begin, b_end).
struct IndexSelectItem {
  int32_t seq, q_begin, q_end;  // relative to the sequence's first query row
  int32_t b_begin, b_end;
  int64_t list_begin;  // bytes into the workspace where its candidate lists lie; -1: written to ids at once
};

struct IndexSelectPlan {
  MsaGeometry geometry;
  IndexSelectOptions options;
  Device device;
  int64_t num_queries = 0;
  int64_t workspace_bytes = 0;  // alignment: Arena::kAlignment
  int num_threads = 0;
  int64_t scratch_begin = 0;  // of the threads, behind the items' lists
  std::vector<IndexSelectItem> items;
};

// Host only; the batch's arrays must lie on the host (CPU) or carry their upper bounds (GPU).
IndexSelectPlan index_select_plan(const MsaGeometry& geometry, const MsaBatch& batch, const IndexSelectOptions& options,
                                  Device device = {});

void index_select(const IndexSelectPlan& plan, const MsaBatch& batch, const Tensor& qi_TRX, const Tensor& ki,
                  const Tensor& ids_RTK, const Tensor& sel_scores_RTK, void* workspace, Stream stream = {});

// The definition of right: plain loops, fp64 sums. Host tensors; allocates.
void index_select_ref(const MsaGeometry& geometry, const MsaBatch& batch, const IndexSelectOptions& options,
                      const Tensor& qi_TRX, const Tensor& ki, const Tensor& ids_RTK, const Tensor& sel_scores_RTK);

}  // namespace m3
