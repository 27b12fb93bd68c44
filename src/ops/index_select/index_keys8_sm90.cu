// int8 copies of index key pages. One CTA per page: a warp takes 16 keys, a lane 4 values of each.
#include <cmath>

#include "hopper/matrix.cuh"
#include "ops/common/msa_device.cuh"
#include "ops/index_select/index_keys8.h"
#include "tensor/cuda_check.h"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

using namespace hopper;

constexpr int kBlock = 128, kDim = 128, kWarps = 8, kRows = kBlock / kWarps;
constexpr float kUp = 1.0f + 0x1p-16f;  // over the rounding of a sum of 128 squares in fp32

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float cta_max(float x, float* shared) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float best = shared[0];
  for (int w = 1; w < kWarps; ++w) best = fmaxf(best, shared[w]);
  return best;
}

__device__ void convert_page(const void* x_PBX, int64_t page, const IndexKeys8& keys) {
  __shared__ float shared[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint2* rows =
      static_cast<const uint2*>(x_PBX) + (page * kBlock + warp * kRows) * (kDim / 4) + lane;
  float largest = 0;
  for (int j = 0; j < kRows; ++j) {
    const uint2 packed = rows[j * (kDim / 4)];
    const float x[4] = {unpack_bf16_low(packed.x), unpack_bf16_high(packed.x),
                        unpack_bf16_low(packed.y), unpack_bf16_high(packed.y)};
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, isfinite(x[i]) ? fabsf(x[i]) : 0.0f);
  }
  const float scale = __fdiv_rn(cta_max(largest, shared), 127.0f);
  float error = 0, norm = 0;
  for (int j = 0; j < kRows; ++j) {
    const uint2 packed = rows[j * (kDim / 4)];
    const float x[4] = {unpack_bf16_low(packed.x), unpack_bf16_high(packed.x),
                        unpack_bf16_low(packed.y), unpack_bf16_high(packed.y)};
    float error2 = 0, norm2 = 0;
    uint32_t codes = 0;
    for (int i = 0; i < 4; ++i) {
      int code = 0;
      if (isinf(x[i])) {
        code = x[i] > 0 ? 127 : -127;
      } else if (!isnan(x[i]) && scale > 0) {
        code = static_cast<int>(rintf(__fdiv_rn(x[i], scale)));
      }
      codes |= (static_cast<uint32_t>(code) & 0xffu) << (8 * i);
      const float difference = fmaf(scale, static_cast<float>(code), -x[i]);
      error2 += difference * difference;
      norm2 += x[i] * x[i];
    }
    reinterpret_cast<uint32_t*>(
        keys.codes_PBX)[((page * kBlock + warp * kRows + j) * kDim) / 4 + lane] = codes;
    error2 = warp_sum(error2);
    norm2 = warp_sum(norm2);
    if (isnan(norm2)) continue;  // the key scores -inf whatever its codes say
    error = fmaxf(error, isinf(norm2) ? INFINITY : sqrtf(error2));
    norm = fmaxf(norm, sqrtf(norm2));
  }
  error = cta_max(error, shared);
  norm = cta_max(norm, shared);
  if (threadIdx.x == 0) {
    keys.scale_P[page] = scale;
    keys.error_P[page] = error * kUp;
    keys.norm_P[page] = norm * kUp;
  }
}

__global__ __launch_bounds__(kWarps * 32) void index_keys8_convert_kernel(const void* x_PBX,
                                                                          int64_t first,
                                                                          IndexKeys8 keys) {
  convert_page(x_PBX, first + blockIdx.x, keys);
}

// blockIdx.x: sequence, blockIdx.y: how many completed blocks before this one.
__global__ __launch_bounds__(kWarps * 32) void index_keys8_append_kernel(MsaBatch batch,
                                                                         const void* x_PBX,
                                                                         IndexKeys8 keys) {
  const MsaSequence s = msa_sequence(batch, blockIdx.x);
  if (s.q_len == 0 || s.k_len == 0) return;
  const int block = max(0, s.first_position) / kBlock + static_cast<int>(blockIdx.y);
  if ((block + 1) * kBlock > s.k_len) return;  // still open
  convert_page(x_PBX, batch.page_table[s.index * batch.max_pages + block], keys);
}

}  // namespace

void index_keys8_append(const MsaBatch& batch, const void* x_PBX, const IndexKeys8& keys,
                        Stream stream) {
  const ProfileRange range("index_keys8_append");
  if (batch.num_seqs == 0 || batch.max_q_len == 0) return;
  M3_CHECK(batch.layout == KvLayout::kPaged, "index_keys8_append needs a paged batch");
  const dim3 grid(static_cast<unsigned>(batch.num_seqs),
                  static_cast<unsigned>((batch.max_q_len + kBlock - 1) / kBlock + 1));
  index_keys8_append_kernel<<<grid, kWarps * 32, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      batch, x_PBX, keys);
  M3_CUDA_CHECK(cudaGetLastError());
}

void index_keys8_convert(const void* x_PBX, int64_t first, int64_t count, const IndexKeys8& keys,
                         Stream stream) {
  if (count == 0) return;
  index_keys8_convert_kernel<<<static_cast<unsigned>(count), kWarps * 32, 0,
                               static_cast<cudaStream_t>(stream.handle)>>>(x_PBX, first, keys);
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace m3
