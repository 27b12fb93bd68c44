// Norm, rotation and cache write of a layer's projections: one warp per vector of 128 (a head of a
// token), lane l holds dims 4l .. 4l+3. The pair (m, m + pairs) lies in lanes pairs/4 apart. Bytes:
// every vector read and written once; about 40 KB a token at 64 + 4 + 4 + 4 + 1 vectors. Decode is
// bound by launch latency, prefill by memory.
#include <cmath>

#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "ops/cache_append/norm_rope_append.h"
#include "ops/common/msa_device.cuh"
#include "tensor/cuda_check.h"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

using namespace hopper;

constexpr int kDim = 128, kBlock = 128, kWarps = 8, kMaxPairs = 32;

struct Vector {
  float x[4];
};

__device__ __forceinline__ Vector load(const void* base, int64_t element, int lane) {
  const uint2 packed =
      *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(base) + element + 4 * lane);
  return {{unpack_bf16_low(packed.x), unpack_bf16_high(packed.x), unpack_bf16_low(packed.y),
           unpack_bf16_high(packed.y)}};
}

__device__ __forceinline__ void store(void* base, int64_t element, int lane, const Vector& v) {
  const uint2 packed = {pack_bf16x2(v.x[0], v.x[1]), pack_bf16x2(v.x[2], v.x[3])};
  *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(base) + element + 4 * lane) = packed;
}

__device__ __forceinline__ void norm(Vector& v, const void* weight, float eps, int lane) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) squares += v.x[i] * v.x[i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  const float scale = 1.0f / sqrtf(squares * (1.0f / kDim) + eps);
  const Vector w = load(weight, 0, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) v.x[i] = v.x[i] * scale * (1.0f + w.x[i]);
}

__device__ __forceinline__ void rotate(Vector& v, const float* cos, const float* sin, int pairs,
                                       int lane) {
  const int apart = pairs / 4;
  Vector other;
#pragma unroll
  for (int i = 0; i < 4; ++i) other.x[i] = __shfl_xor_sync(0xffffffffu, v.x[i], apart);
  if (lane >= 2 * apart) return;
  const bool second = lane >= apart;
  const int m = 4 * (second ? lane - apart : lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float c = cos[m + i], s = sin[m + i];
    v.x[i] = second ? v.x[i] * c + other.x[i] * s : v.x[i] * c - other.x[i] * s;
  }
}

__global__ __launch_bounds__(kWarps *
                             32) void norm_rope_append_kernel(const NormRopeAppendParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x;
  int which =
      blockIdx.y * kWarps + threadIdx.x / 32;  // q heads, k heads, v heads, index q heads, index k
  const int n = msa_find(p.cu_q, p.num_seqs, static_cast<int32_t>(token));
  const int position = p.seq_lens[n] - p.cu_q[n + 1] + static_cast<int>(token);
  const int64_t page = position < 0 ? 0 : p.page_table[n * p.page_stride + position / kBlock];
  const int slot = position % kBlock;
  const float *cos = p.cos_TM + token * p.pairs, *sin = p.sin_TM + token * p.pairs;
  grid_dependency_wait();
  grid_dependency_launch();

  if (which < p.heads) {
    Vector v = load(p.q_THD, token * p.q_token_stride + which * kDim, lane);
    norm(v, p.w_q, p.eps, lane);
    rotate(v, cos, sin, p.pairs, lane);
    return store(p.q_out_THD, (token * p.heads + which) * kDim, lane, v);
  }
  which -= p.heads;
  if (which < 2 * p.groups) {
    const bool key = which < p.groups;
    const int group = key ? which : which - p.groups;
    Vector v = load(key ? p.k_TRD : p.v_TRD,
                    token * (key ? p.k_token_stride : p.v_token_stride) + group * kDim, lane);
    if (key) {
      norm(v, p.w_k, p.eps, lane);
      rotate(v, cos, sin, p.pairs, lane);
    }
    if (position >= 0)
      store(key ? p.k_PRBD : p.v_PRBD, ((page * p.groups + group) * kBlock + slot) * kDim, lane, v);
    return;
  }
  which -= 2 * p.groups;
  if (p.ki_TX == nullptr || which > p.groups) return;
  const bool query = which < p.groups;
  Vector v = query ? load(p.qi_TRX, token * p.qi_token_stride + which * kDim, lane)
                   : load(p.ki_TX, token * p.ki_token_stride, lane);
  norm(v, query ? p.w_qi : p.w_ki, p.eps, lane);
  rotate(v, cos, sin, p.pairs, lane);
  if (query) {
    store(p.qi_out_TRX, (token * p.groups + which) * kDim, lane, v);
  } else if (position >= 0) {
    store(p.x_PBX, (page * kBlock + slot) * kDim, lane, v);
  }
}

struct Frequencies {
  float value[kMaxPairs];
};

__global__ void rope_angles_kernel(const RopeAnglesParams p, const Frequencies frequencies) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= p.num_queries * p.pairs) return;
  const int token = static_cast<int>(i / p.pairs), m = static_cast<int>(i % p.pairs);
  const int n = msa_find(p.cu_q, p.num_seqs, token);
  const int position = max(0, p.seq_lens[n] - p.cu_q[n + 1] + token);
  const double angle =
      static_cast<float>(position) * frequencies.value[m];  // the fp32 product, widened
  p.cos_TM[i] = static_cast<float>(cos(angle));
  p.sin_TM[i] = static_cast<float>(sin(angle));
}

}  // namespace

void norm_rope_append(const NormRopeAppendParams& p, bool dependent, Stream stream) {
  const ProfileRange range("norm_rope_append");
  if (p.num_queries == 0) return;
  M3_CHECK(p.pairs > 0 && p.pairs <= kMaxPairs && (p.pairs & (p.pairs - 1)) == 0 && p.pairs >= 4,
           "norm_rope_append: {} rotated pairs, want 4, 8, 16 or 32", p.pairs);
  const int vectors = p.heads + 2 * p.groups + (p.ki_TX != nullptr ? p.groups + 1 : 0);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.num_queries),
                        static_cast<unsigned>((vectors + kWarps - 1) / kWarps));
  config.blockDim = dim3(kWarps * 32);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, norm_rope_append_kernel, p));
}

void rope_angles_paged(const RopeAnglesParams& p, Stream stream) {
  const ProfileRange range("rope_angles_paged");
  if (p.num_queries == 0) return;
  M3_CHECK(p.pairs > 0 && p.pairs <= kMaxPairs, "rope_angles_paged: {} pairs, want 1 to {}",
           p.pairs, kMaxPairs);
  Frequencies frequencies = {};
  for (int m = 0; m < p.pairs; ++m) {  // in fp32, as the references do (model.md §4.2)
    frequencies.value[m] =
        1.0f / std::pow(static_cast<float>(p.theta),
                        static_cast<float>(2 * m) / static_cast<float>(2 * p.pairs));
  }
  const int64_t count = p.num_queries * p.pairs;
  rope_angles_kernel<<<static_cast<unsigned>((count + 127) / 128), 128, 0,
                       static_cast<cudaStream_t>(stream.handle)>>>(p, frequencies);
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace m3
