// General path of index_select on a GPU: any geometry, f32 or bf16, all options. One CTA per (query
// row, group): warps score blocks (a lane per key, plain fp32 FMA), the block maxima stay in shared
// memory (4 bytes per block), K rounds of an exact argmax choose. Not fast: it serves small or
// unusual geometries and is the oracle of the Hopper path on large inputs.
#include <cuda_runtime.h>

#include "ops/common/msa_device.cuh"
#include "ops/index_select/index_select_cuda.h"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxIndexDim = 1024, kMaxTopk = 128;
constexpr int kMaxDynamicBytes = 200 * 1024;  // of 227 KB; the rest holds the static arrays

// Rank keys: canonical scores map in order to 0x007fffff (-inf) .. 0xff800000 (+inf). Forced blocks
// lie above every score, blocks that are taken below.
constexpr uint32_t kForced = 0xffffffffu, kTaken = 0;

__device__ uint32_t rank_key(float score) {
  const uint32_t bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ float rank_score(uint32_t key) {
  if (key == kForced) return INFINITY;
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ unsigned long long cta_max(unsigned long long value, unsigned long long* scratch) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) value = max(value, scratch[w]);
  __syncthreads();
  return value;
}

template <typename Query, typename Key>
__global__ void __launch_bounds__(kThreads)
    index_select_general_kernel(const MsaGeometry geometry, const MsaBatch batch,
                                const IndexSelectOptions options, const Query* qi_TRX,
                                const Key* ki, int32_t* ids_RTK, float* sel_scores_RTK) {
  extern __shared__ uint32_t keys[];  // [blocks]
  __shared__ float q[kMaxIndexDim];
  __shared__ int chosen[kMaxTopk];
  __shared__ float chosen_score[kMaxTopk];
  __shared__ unsigned long long scratch[kThreads / 32];

  const int K = geometry.topk, X = geometry.index_dim, B = geometry.block;
  const int64_t i = blockIdx.x;
  const int r = blockIdx.y, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;

  const MsaSequence seq =
      msa_sequence(batch, msa_find(batch.cu_q, batch.num_seqs, static_cast<int32_t>(i)));
  const int p = seq.first_position + static_cast<int>(i) - seq.q_begin;
  const int own = p < 0 ? -1 : p / B;
  const int num_sel = min(K, own + 1);
  const bool by_score = options.order == SelectOrder::kScore;
  const bool scored = own + 1 > K || by_score || options.sel_scores;

  if (!scored) {
    for (int s = tid; s < num_sel; s += kThreads) chosen[s] = s;
  } else {
    for (int c = tid; c < X; c += kThreads)
      q[c] = msa_load(qi_TRX + (i * geometry.groups + r) * X + c);
    __syncthreads();
    for (int b = warp; b <= own; b += kThreads / 32) {
      if (b > own - geometry.local || b < geometry.init) {
        if (lane == 0) keys[b] = kForced;
        continue;
      }
      const int64_t row = msa_block_row(batch, seq, b, B);
      const int visible = min(B, p + 1 - b * B);
      float best = -INFINITY;
      for (int j = lane; j < visible; j += 32) {
        const Key* k = ki + (row + j) * X;
        float z = 0;
        for (int c = 0; c < X; ++c) z = fmaf(q[c], msa_load(k + c), z);
        best = fmaxf(best, z);
      }
      for (int offset = 16; offset > 0; offset /= 2)
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, offset));
      if (lane == 0) keys[b] = rank_key(msa_canonical_score(best));
    }
    __syncthreads();
    for (int s = 0; s < num_sel; ++s) {  // higher key first, then lower id
      unsigned long long best = 0;
      for (int b = tid; b <= own; b += kThreads) {
        if (keys[b] != kTaken)
          best = max(best, (1ull * keys[b]) << 32 | (0xffffffffu - static_cast<uint32_t>(b)));
      }
      best = cta_max(best, scratch);
      if (tid == 0) {
        const int b = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
        chosen[s] = b;
        chosen_score[s] = rank_score(keys[b]);
        keys[b] = kTaken;
      }
      __syncthreads();
    }
  }
  __syncthreads();

  // Rank of slot s in the wanted order: ascending ids, or as chosen with the own block last.
  int32_t* ids = ids_RTK + (r * batch.num_queries + i) * K;
  float* sel_scores =
      options.sel_scores ? sel_scores_RTK + (r * batch.num_queries + i) * K : nullptr;
  for (int s = tid; s < K; s += kThreads) {
    if (s >= num_sel) {
      ids[s] = -1;
      if (sel_scores != nullptr) sel_scores[s] = -INFINITY;
      continue;
    }
    int rank = 0;
    for (int t = 0; t < num_sel; ++t) {
      if (t == s) continue;
      const bool before =
          by_score ? chosen[s] == own || (chosen[t] != own && t < s) : chosen[t] < chosen[s];
      rank += before ? 1 : 0;
    }
    ids[rank] = chosen[s];
    if (sel_scores != nullptr) sel_scores[rank] = chosen_score[s];
  }
}

template <typename Query, typename Key>
void launch(const IndexSelectCudaArgs& a, cudaStream_t stream) {
  const int64_t blocks = (a.batch.max_k_len + a.geometry.block - 1) / a.geometry.block;
  const int64_t bytes = blocks * 4;
  M3_CHECK(bytes <= kMaxDynamicBytes,
           "index_select: {} blocks per sequence, the general path holds at most {}", blocks,
           kMaxDynamicBytes / 4);
  const auto kernel = index_select_general_kernel<Query, Key>;
  M3_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxDynamicBytes));
  const dim3 grid(static_cast<unsigned>(a.batch.num_queries), a.geometry.groups);
  kernel<<<grid, kThreads, bytes, stream>>>(
      a.geometry, a.batch, a.options, static_cast<const Query*>(a.qi_TRX),
      static_cast<const Key*>(a.ki), a.ids_RTK, a.sel_scores_RTK);
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void index_select_general(const IndexSelectCudaArgs& args, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const bool query_bf16 = args.query_dtype == DType::kBF16,
             key_bf16 = args.key_dtype == DType::kBF16;
  if (query_bf16 && key_bf16) {
    launch<__nv_bfloat16, __nv_bfloat16>(args, handle);
  } else if (query_bf16) {
    launch<__nv_bfloat16, float>(args, handle);
  } else if (key_bf16) {
    launch<float, __nv_bfloat16>(args, handle);
  } else {
    launch<float, float>(args, handle);
  }
}

}  // namespace m3
