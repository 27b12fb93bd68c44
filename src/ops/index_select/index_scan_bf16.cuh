// bf16 keys for index_scan.cuh.
#pragma once
#include "ops/index_select/index_scan.cuh"
#include "ops/index_select/index_score.cuh"

namespace m3::index_scan {

struct Bf16Keys {
  static constexpr int kPageBytes = kBlock * kDim * 2;
  static constexpr bool kScaled = false;

  template <int kWarpTiles>
  struct Query {
    uint32_t chunk[kWarpTiles][4][4];
  };

  template <int kTiles>
  static __device__ __forceinline__ void load_queries(const IndexDecodeParams& p, Rows rows,
                                                      Query<kWarpTiles<kTiles>>& query) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
      const int column = 8 * (warp / kKeyWarps<kTiles> * kWarpTiles<kTiles> + j) + quad;
      const uint4* row = static_cast<const uint4*>(p.qi_TRX) +
                         (int64_t{rows.first} * p.groups + column) * (kDim / 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 chunk = column < rows.columns ? row[4 * i + t] : uint4{0, 0, 0, 0};
        query.chunk[j][i][0] = chunk.x, query.chunk[j][i][1] = chunk.y;
        query.chunk[j][i][2] = chunk.z, query.chunk[j][i][3] = chunk.w;
      }
    }
  }

  // Largest score of the warp's 16 (or 32) keys for each of its columns. fmaxf drops NaN, so a NaN
  // key spoils only itself.
  template <int kTiles>
  static __device__ __forceinline__ void score_keys(const uint8_t* page,
                                                    const Query<kWarpTiles<kTiles>>& query, float,
                                                    float* maxima) {
    constexpr int kRows = 16 * kColumnWarps<kTiles>;  // keys of a warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
    const uint4* keys = reinterpret_cast<const uint4*>(page) +
                        (kRows * (warp % kKeyWarps<kTiles>)+quad) * (kDim / 8) + t;
    float best[kWarpTiles<kTiles>][2];
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) best[j][0] = best[j][1] = -INFINITY;
#pragma unroll
    for (int row = 0; row < kRows; row += 16) {
      uint4 a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = keys[row * (kDim / 8) + 4 * i], b[i] = keys[(row + 8) * (kDim / 8) + 4 * i];
#pragma unroll
      for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
        float sum[4];
        bf16_scores(a, b, query.chunk[j], sum);
        best[j][0] = fmaxf(fmaxf(best[j][0], sum[0]), sum[2]);
        best[j][1] = fmaxf(fmaxf(best[j][1], sum[1]), sum[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        best[j][0] = fmaxf(best[j][0], __shfl_xor_sync(0xffffffffu, best[j][0], step));
        best[j][1] = fmaxf(best[j][1], __shfl_xor_sync(0xffffffffu, best[j][1], step));
      }
      store_maxima<kTiles>(best[j][0], best[j][1], j, maxima);
    }
  }
};

}  // namespace m3::index_scan
