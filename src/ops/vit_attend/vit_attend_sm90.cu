// Bidirectional attention over segments, head dim 80 in M3's tower (model.md §8.2, §8.4).
//
// CTA: 128 queries of one head; 4 warps of 32 queries (two m16 tiles, so that every K and V
// fragment read from shared memory serves both). Keys in tiles of 64 through two buffers filled by
// cp.async; S = Q K^T, online softmax and O += P V with mma.sync m16n8k16, P never leaves
// registers. wgmma would need padding of 80 to 128 columns in its 128-byte swizzle; mma.sync takes
// 80 as it is. Shared memory: Q [128][D + 8] and 2 x (K, V) of [64][D + 8] bf16; the 8 keep
// ldmatrix rows on different banks. 67 KB for D = 80: two CTAs an SM. FLOP: 4*128*64*D a tile step;
// L2 traffic 64*D*4 bytes per step: compute bound.
#include "ops/vit_attend/vit_attend_sm90.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "hopper/async_copy.cuh"
#include "hopper/matrix.cuh"
#include "tensor/cuda_check.h"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

using namespace hopper;

constexpr int kQueries = 128, kKeys = 64, kWarps = 4, kThreads = kWarps * 32;
constexpr float kLn2 = 0.693147180559945f, kLog2e = 1.44269504088896f;

template <int kDim>
struct Buffers {
  static constexpr int kStride = kDim + 8;
  __nv_bfloat16 q[kQueries][kStride], k[2][kKeys][kStride], v[2][kKeys][kStride];
};

template <int kDim>
__device__ __forceinline__ void fetch_keys(const VitAttendParams& p, const VitTile& tile, int head,
                                           int first, int buffer, Buffers<kDim>& shared) {
  constexpr int kChunks = kDim / 8;
  const auto* k = static_cast<const __nv_bfloat16*>(p.k_THD) + head * kDim;
  const auto* v = static_cast<const __nv_bfloat16*>(p.v_THD) + head * kDim;
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
    const int key = i / kChunks, chunk = i % kChunks * 8;
    const bool valid = first + key < tile.last_key;
    const int64_t at = int64_t{valid ? first + key : tile.first_key} * p.token_stride + chunk;
    async_copy_16_or_zeros(&shared.k[buffer][key][chunk], k + at, valid);
    async_copy_16_or_zeros(&shared.v[buffer][key][chunk], v + at, valid);
  }
  async_copy_commit();
}

// One warp: two tiles of 16 queries; rows g and g + 8 of each.
template <int kDim>
struct State {
  float o[2][kDim / 8][4];
  float maximum[2][2], sum[2][2];
};

template <int kDim>
__device__ __forceinline__ void fetch_queries(const VitAttendParams& p, const VitTile& tile,
                                              int head, Buffers<kDim>& shared) {
  constexpr int kChunks = kDim / 8;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q_THD) + head * kDim;
  for (int i = threadIdx.x; i < kQueries * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks * 8;
    const bool valid = tile.begin + row < tile.end;
    async_copy_16_or_zeros(
        &shared.q[row][chunk],
        q + int64_t{valid ? tile.begin + row : tile.begin} * p.token_stride + chunk, valid);
  }
  async_copy_commit();
}

// s = log2(e) scale Q K^T for 64 keys; keys from `count` on are masked.
template <int kDim>
__device__ __forceinline__ void logits(const Buffers<kDim>& shared, int buffer, float scale,
                                       int count, float (&s)[2][kKeys / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t query[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      ldmatrix_x4(query[m], &shared.q[32 * warp + 16 * m + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      // matrices: keys 8n.. of dims 16s.. and 16s+8.., then keys 8n+8.. likewise
      uint32_t b[4];
      ldmatrix_x4(
          b, &shared.k[buffer][8 * n + lane / 16 * 8 + lane % 8][16 * step + lane / 8 % 2 * 8]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_m16n8k16_bf16(s[m][n], query[m], {b[0], b[1]});
        mma_m16n8k16_bf16(s[m][n + 1], query[m], {b[2], b[3]});
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[m][n][e] = 8 * n + 2 * t + e % 2 < count ? s[m][n][e] * scale : -INFINITY;
    }
  }
}

// Every tile has a visible key, so the new maximum is finite unless the logits are not.
template <int kDim>
__device__ __forceinline__ void softmax_step(float (&s)[2][kKeys / 8][4], State<kDim>& state) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = state.maximum[m][h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = top == -INFINITY ? 0.0f : top,
                  factor = exp2_approx(state.maximum[m][h] - base);
      state.maximum[m][h] = top;
      float total = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        s[m][n][2 * h] = exp2_approx(s[m][n][2 * h] - base);
        s[m][n][2 * h + 1] = exp2_approx(s[m][n][2 * h + 1] - base);
        total += s[m][n][2 * h] + s[m][n][2 * h + 1];
      }
      state.sum[m][h] = state.sum[m][h] * factor + total;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j)
        state.o[m][j][2 * h] *= factor, state.o[m][j][2 * h + 1] *= factor;
    }
  }
}

template <int kDim>
__device__ __forceinline__ void add_values(const __nv_bfloat16 (&v)[kKeys][Buffers<kDim>::kStride],
                                           const float (&s)[2][kKeys / 8][4], State<kDim>& state) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t prob[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      prob[m][0] = pack_bf16x2(s[m][2 * step][0], s[m][2 * step][1]);
      prob[m][1] = pack_bf16x2(s[m][2 * step][2], s[m][2 * step][3]);
      prob[m][2] = pack_bf16x2(s[m][2 * step + 1][0], s[m][2 * step + 1][1]);
      prob[m][3] = pack_bf16x2(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
    }
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, &v[16 * step + lane % 16][16 * j + lane / 16 * 8]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_m16n8k16_bf16(state.o[m][2 * j], prob[m], {b[0], b[1]});
        mma_m16n8k16_bf16(state.o[m][2 * j + 1], prob[m], {b[2], b[3]});
      }
    }
  }
}

template <int kDim>
__device__ __forceinline__ void store_rows(const VitAttendParams& p, const VitTile& tile, int head,
                                           const State<kDim>& state) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.sum[m][h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = tile.begin + 32 * warp + 16 * m + quad + 8 * h;
      if (row >= tile.end) continue;
      const float scale = 1.0f / sum;
      auto* out =
          static_cast<__nv_bfloat16*>(p.o_THD) + (int64_t{row} * p.heads + head) * kDim + 2 * t;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(out + 8 * j) =
            pack_bf16x2(state.o[m][j][2 * h] * scale, state.o[m][j][2 * h + 1] * scale);
      }
      if (t == 0 && p.lse_TH != nullptr) {
        p.lse_TH[int64_t{row} * p.heads + head] = kLn2 * (state.maximum[m][h] + log2f(sum));
      }
    }
  }
}

template <int kDim>
__global__ __launch_bounds__(kThreads, 2) void vit_attend_kernel(const VitAttendParams p) {
  extern __shared__ __align__(16) uint8_t smem[];
  Buffers<kDim>& shared = *reinterpret_cast<Buffers<kDim>*>(smem);
  const int head = blockIdx.x % p.heads;
  const VitTile tile = p.tiles[blockIdx.x / p.heads];
  fetch_queries<kDim>(p, tile, head, shared);
  fetch_keys<kDim>(p, tile, head, tile.first_key, 0, shared);
  State<kDim> state = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) state.maximum[m][0] = state.maximum[m][1] = -INFINITY;
  int buffer = 0;
  for (int first = tile.first_key; first < tile.last_key; first += kKeys) {
    const bool more = first + kKeys < tile.last_key;
    if (more) {
      fetch_keys<kDim>(p, tile, head, first + kKeys, buffer ^ 1, shared);
      async_copy_wait<1>();
    } else {
      async_copy_wait<0>();
    }
    __syncthreads();
    float s[2][kKeys / 8][4];
    logits<kDim>(shared, buffer, p.scale * kLog2e, tile.last_key - first, s);
    softmax_step<kDim>(s, state);
    add_values<kDim>(shared.v[buffer], s, state);
    __syncthreads();  // the buffer is read: the copy after the next goes there
    buffer ^= 1;
  }
  store_rows<kDim>(p, tile, head, state);
}

template <int kDim>
void launch(const VitAttendParams& params, cudaStream_t stream) {
  const auto kernel = vit_attend_kernel<kDim>;
  constexpr int kBytes = sizeof(Buffers<kDim>);
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<static_cast<unsigned>(params.num_tiles * params.heads), kThreads, kBytes, stream>>>(
      params);
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

std::vector<VitTile> vit_attend_tiles(std::span<const int32_t> cu_segments) {
  std::vector<VitTile> tiles;
  for (size_t i = 0; i + 1 < cu_segments.size(); ++i) {
    for (int32_t begin = cu_segments[i]; begin < cu_segments[i + 1]; begin += kQueries) {
      tiles.push_back({begin, std::min(begin + kQueries, cu_segments[i + 1]), cu_segments[i],
                       cu_segments[i + 1]});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const VitTile& a, const VitTile& b) {
    return a.last_key - a.first_key > b.last_key - b.first_key;
  });
  return tiles;
}

void vit_attend_sm90(const VitAttendParams& params, Stream stream) {
  const ProfileRange range("vit_attend");
  if (params.num_tiles == 0) return;
  M3_CHECK(params.token_stride % 8 == 0,
           "vit_attend: token_stride {} must be a multiple of 8 elements", params.token_stride);
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  switch (params.head_dim) {
    case 64:
      return launch<64>(params, handle);
    case 80:
      return launch<80>(params, handle);
    default:
      M3_FAIL("vit_attend: head dim {} on the GPU; supported are 64 and 80", params.head_dim);
  }
}

}  // namespace m3
