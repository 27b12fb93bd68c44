// General path of attend on a GPU: any geometry and support, f32 or bf16. One warp per (query row,
// head), 32 keys at a time: a lane per key for the logits, a lane per channel for P V, online
// softmax, all fp32. Not fast: it serves small or unusual geometries and is the oracle of the
// Hopper paths on large inputs.
#include "hopper/dependent_launch.cuh"
#include "hopper/fence.cuh"
#include "ops/attend/attend_cuda.h"
#include "ops/attend/attend_sm90.h"
#include "ops/common/msa_device.cuh"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

constexpr int kWarps = 4, kMaxDim = 256, kPerLane = kMaxDim / 32;

template <typename Kv>
struct Row {
  const AttendCudaArgs& args;
  const MsaSequence& seq;
  const float* q;  // scaled by log2(e) * scale, [D] in shared memory
  int r, lane;
  float maximum = -INFINITY, sum = 0;
  float out[kPerLane] = {};

  // Keys base .. base+count-1 (count <= 32), or the positions tokens[0 .. count-1].
  __device__ void add_keys(int base, const int32_t* tokens, int count) {
    const MsaGeometry& g = args.geometry;
    const int D = g.head_dim, B = g.block;
    int64_t offset = 0;
    float logit = -INFINITY;
    if (lane < count) {
      const int j = tokens != nullptr ? tokens[lane] : base + lane;
      offset = msa_kv_offset(args.batch, seq, j / B, j % B, r, g.groups, B, D);
      const Kv* k = static_cast<const Kv*>(args.k) + offset;
      logit = 0;
      for (int c = 0; c < D; ++c) logit = fmaf(q[c], msa_load(k + c), logit);
    }
    float chunk_max = logit;
    for (int o = 16; o > 0; o /= 2)
      chunk_max = fmaxf(chunk_max, __shfl_xor_sync(0xffffffffu, chunk_max, o));
    const float new_max = fmaxf(maximum, chunk_max);
    const float shift = new_max == -INFINITY ? 0.0f : new_max;  // -inf - -inf would be NaN
    const float weight = exp2f(logit - shift), old = exp2f(maximum - shift);
    float chunk_sum = weight;
    for (int o = 16; o > 0; o /= 2) chunk_sum += __shfl_xor_sync(0xffffffffu, chunk_sum, o);
    sum = sum * old + chunk_sum;
    maximum = new_max;
    for (int t = 0; t < kPerLane; ++t) out[t] *= old;
    for (int j = 0; j < count; ++j) {
      const float w = __shfl_sync(0xffffffffu, weight, j);
      const Kv* v = static_cast<const Kv*>(args.v) + __shfl_sync(0xffffffffu, offset, j);
      for (int t = 0; t < kPerLane; ++t) {
        if (lane + 32 * t < D) out[t] = fmaf(w, msa_load(v + lane + 32 * t), out[t]);
      }
    }
  }
  __device__ void add_range(int begin, int end) {
    for (int j = begin; j < end; j += 32) add_keys(j, nullptr, min(32, end - j));
  }
};

// One (query row i, head h) by one warp; q is the warp's [D] in shared memory.
template <typename Kv>
__device__ void attend_row(const AttendCudaArgs& args, float scale_log2, int64_t i, int h, float* q,
                           int lane) {
  const MsaGeometry& g = args.geometry;
  const int D = g.head_dim, r = h / g.heads_per_group;
  const int64_t row = i * g.groups * g.heads_per_group + h;
  __syncwarp();  // the previous row is done with q
  for (int c = lane; c < D; c += 32) {
    q[c] = scale_log2 * (args.query_dtype == DType::kBF16
                             ? msa_load(static_cast<const __nv_bfloat16*>(args.q_THD) + row * D + c)
                             : static_cast<const float*>(args.q_THD)[row * D + c]);
  }
  __syncwarp();

  const MsaSequence seq = msa_sequence(
      args.batch, msa_find(args.batch.cu_q, args.batch.num_seqs, static_cast<int32_t>(i)));
  const int p = seq.first_position + static_cast<int>(i) - seq.q_begin;
  Row<Kv> state{args, seq, q, r, lane};
  if (p >= 0) {
    const AttendSupport& support = args.support;
    if (support.kind == AttendSupport::Kind::kBlocks) {
      const int32_t* ids = args.lists + (r * args.batch.num_queries + i) * g.topk;
      for (int s = 0; s < g.topk && ids[s] >= 0; ++s) {
        state.add_range(ids[s] * g.block, min((ids[s] + 1) * g.block, p + 1));
      }
    } else if (support.kind == AttendSupport::Kind::kTokens) {
      const int32_t* tokens = args.lists + i * support.budget;
      for (int64_t s = 0; s < support.budget && tokens[s] >= 0; s += 32) {
        int count = 0;
        while (count < 32 && s + count < support.budget && tokens[s + count] >= 0) ++count;
        state.add_keys(0, tokens + s, count);
      }
    } else if (support.kind == AttendSupport::Kind::kWindow) {
      const int begin = static_cast<int>(max(int64_t{0}, p + 1 - max(support.window, int64_t{0})));
      state.add_range(0, static_cast<int>(min(support.sink, int64_t{begin})));
      state.add_range(begin, p + 1);
    } else {
      state.add_range(0, p + 1);
    }
  }
  const float inverse = state.sum == 0 ? 0.0f : 1.0f / state.sum;
  for (int t = 0; t < kPerLane; ++t) {
    if (lane + 32 * t >= D) break;
    const int64_t at = row * D + lane + 32 * t;
    if (args.out_dtype == DType::kBF16) {
      msa_store(static_cast<__nv_bfloat16*>(args.o_THD) + at, state.out[t] * inverse);
    } else {
      static_cast<float*>(args.o_THD)[at] = state.out[t] * inverse;
    }
  }
  if (lane == 0 && args.lse_TH != nullptr) {
    args.lse_TH[row] =
        state.sum == 0 ? -INFINITY : (state.maximum + log2f(state.sum)) * 0.6931471805599453f;
  }
}

template <typename Kv>
__global__ void __launch_bounds__(kWarps * 32)
    attend_general_kernel(const AttendCudaArgs args, float scale_log2) {
  __shared__ float q[kWarps][kMaxDim];
  const int H = args.geometry.groups * args.geometry.heads_per_group, warp = threadIdx.x / 32;
  const int64_t row = int64_t{blockIdx.x} * kWarps + warp;
  if (row >= args.batch.num_queries * H) return;
  attend_row<Kv>(args, scale_log2, row / H, static_cast<int>(row % H), q[warp], threadIdx.x % 32);
}

__global__ void __launch_bounds__(kWarps * 32)
    attend_repair_kernel(const AttendCudaArgs args, float scale_log2, const AttendRepairRow* rows,
                         const int32_t* count) {
  __shared__ float q[kWarps][kMaxDim];
  const int G = args.geometry.heads_per_group, warp = threadIdx.x / 32;
  hopper::grid_dependency_wait();
  const int64_t total = int64_t{*count} * G;
  for (int64_t work = int64_t{blockIdx.x} * kWarps + warp; work < total;
       work += int64_t{gridDim.x} * kWarps) {
    const AttendRepairRow row = rows[work / G];
    const int head = row.group * G + static_cast<int>(work % G);
    attend_row<__nv_bfloat16>(args, scale_log2, row.query, head, q[warp], threadIdx.x % 32);
  }
}

float scale_log2_of(const AttendCudaArgs& args) {
  return static_cast<float>(args.geometry.logit_scale() * 1.4426950408889634);
}

}  // namespace

void attend_general(const AttendCudaArgs& args, Stream stream) {
  const MsaGeometry& g = args.geometry;
  M3_CHECK(g.head_dim <= kMaxDim, "attend: head_dim {}, the GPU path goes up to {}", g.head_dim,
           kMaxDim);
  const auto kernel = args.kv_dtype == DType::kBF16 ? attend_general_kernel<__nv_bfloat16>
                                                    : attend_general_kernel<float>;
  const int64_t ctas = (args.batch.num_queries * g.heads() + kWarps - 1) / kWarps;
  kernel<<<static_cast<unsigned>(ctas), kWarps * 32, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      args, scale_log2_of(args));
  M3_CUDA_CHECK(cudaGetLastError());
}

void attend_repair(const AttendCudaArgs& args, const AttendRepairRow* rows, const int32_t* count,
                   Stream stream) {
  constexpr int kCtas = 528;  // 4 per SM; almost always there is nothing to do
  hopper::launch_dependent(attend_repair_kernel, kCtas, kWarps * 32, 0,
                           static_cast<cudaStream_t>(stream.handle), args, scale_log2_of(args),
                           rows, count);
}

}  // namespace m3
