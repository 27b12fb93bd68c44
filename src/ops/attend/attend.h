// attend: softmax attention over the keys that AttendSupport describes. Contract: msa.md §5, §16.
//
//   a[i,h,j] = scale * q[i,h] . k[j,r], r = h / G      LSE[i,h] = ln sum_j exp a      O = sum_j exp(a - LSE) v[j,r]
//
//   q_THD   [T, H, D]  f32|bf16            k, v   [S, R, D] or [P, R, B, D], both f32 or both bf16
//   lists   kBlocks: ids int32 [R, T, K]   any order with distinct blocks, own block last if present,
//                                          -1 behind the valid prefix (msa.md §4)
//           kTokens: int32 [T, budget]     distinct positions <= p, -1 behind
//           else absent
//   o_THD   [T, H, D]  f32|bf16            lse_TH  fp32 [T, H] (natural logarithm) or absent
//
// Empty rows (position < 0, or an empty list): O = 0, LSE = -inf. Keys and values that a row does not
// see have no effect on it, even NaN. Outputs must not overlap inputs; every element is written.
// Deterministic: on the CPU a row's bits depend on its own inputs only, never on the batch, the chunking, the layout of
// the keys or the number of threads. On the GPU they may also depend on the kernel that the batch gets
// (attend_cuda.h).
// run: no allocation, no waiting, capturable.
#pragma once
#include <vector>

#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

struct AttendOptions {
  AttendSupport support;
  MsaCompute compute = MsaCompute::kBF16;
};

constexpr int kDecodeQueries = 16;  // up to so many query rows of a sequence, keys are split over threads

// One piece of CPU work: query rows [q_begin, q_end) of a sequence and one group against part
// `split` of the keys (of `num_splits`, cut by the sequence's own length only).
struct AttendItem {
  int32_t seq, group, q_begin, q_end, split, num_splits;
  int64_t partial_begin;  // bytes into the workspace where its partial rows lie; -1: written to the outputs at once
};

struct AttendPlan {
  MsaGeometry geometry;
  AttendOptions options;
  Device device;
  int64_t num_queries = 0;
  int64_t workspace_bytes = 0;  // alignment: Arena::kAlignment
  int num_threads = 0;
  int chunk = 0;              // query rows of an item, at most
  bool has_spans = false;     // some item joins several spans (attend_cpu.cpp)
  int64_t scratch_begin = 0;  // of the threads, behind the items' partial rows
  std::vector<AttendItem> items;
};

AttendPlan attend_plan(const MsaGeometry& geometry, const MsaBatch& batch, const AttendOptions& options,
                       Device device = {});

void attend(const AttendPlan& plan, const MsaBatch& batch, const Tensor& q_THD, const Tensor& k, const Tensor& v,
            const Tensor& lists, const Tensor& o_THD, const Tensor& lse_TH, void* workspace, Stream stream = {});

// Name of the kernels that `attend` takes for tensors of these types: "cpu", or one of attend_cuda.h.
const char* attend_path(const AttendPlan& plan, const MsaBatch& batch, DType query_dtype, DType kv_dtype,
                        DType out_dtype);

// The definition of right: plain loops in fp64, rounded once at the end. Host tensors; allocates.
void attend_ref(const MsaGeometry& geometry, const MsaBatch& batch, const AttendSupport& support, const Tensor& q_THD,
                const Tensor& k, const Tensor& v, const Tensor& lists, const Tensor& o_THD, const Tensor& lse_TH);

}  // namespace m3
