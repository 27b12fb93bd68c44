// 8-bit index keys for decode: the scan of int8 pages (index_scan.cuh), and the kernel that settles
// the choice with bf16 keys.
//
// index_decode_rescore: a cluster of 8 CTAs per (query row, group). Every CTA finds the candidates
// from the 8-bit scores by itself; CTA r scores the candidates with place % 8 = r in bf16, straight
// from global memory in the fragments of the scan (so with its bits), and bounds the blocks left
// out with block % 8 = r. Scores and bounds meet in CTA 0, which ranks, writes the ids and judges
// the certificate. Bytes: 32 KB a candidate; latency bound for small batches.
#include "hopper/cluster.cuh"
#include "ops/index_select/index_codes8.cuh"
#include "ops/index_select/index_decode8.h"
#include "ops/index_select/index_scan.cuh"
#include "ops/index_select/index_score.cuh"
#include "ops/index_select/select_blocks.cuh"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

using namespace hopper;
using index_scan::kBlock;
using index_scan::kDim;

__device__ __forceinline__ void unpack8(uint4 packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[2 * i] = unpack_bf16_low(words[i]), x[2 * i + 1] = unpack_bf16_high(words[i]);
}

struct Int8Keys {
  static constexpr int kPageBytes = kBlock * kDim;
  static constexpr bool kScaled = true;

  template <int kWarpTiles>
  struct Query {
    uint32_t chunk[kWarpTiles][2][4];  // codes 16t.. and 64 + 16t.. of the column's row
  };

  template <int kTiles>
  static __device__ __forceinline__ void load_queries(
      const IndexDecodeParams& p, index_scan::Rows rows,
      Query<index_scan::kWarpTiles<kTiles>>& query) {
    using namespace index_scan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
      const int column = 8 * (warp / kKeyWarps<kTiles> * kWarpTiles<kTiles> + j) + quad;
      const uint4* row = static_cast<const uint4*>(p.qi_TRX) +
                         (int64_t{rows.first} * p.groups + column) * (kDim / 8);
      float x[4][8] = {};
      float largest = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column < rows.columns) unpack8(row[8 * (i / 2) + 2 * t + i % 2], x[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = fmaxf(largest, finite_abs(x[i][e]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float scale = __fdiv_rn(largest, 127.0f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          uint32_t codes = 0;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            codes |= (static_cast<uint32_t>(code_of(x[i][4 * w + e], scale)) & 0xffu) << (8 * e);
          query.chunk[j][i / 2][2 * (i % 2) + w] = codes;
        }
      }
    }
  }

  template <int kTiles>
  static __device__ __forceinline__ void score_keys(
      const uint8_t* page, const Query<index_scan::kWarpTiles<kTiles>>& query, float scale,
      float* maxima) {
    using namespace index_scan;
    constexpr int kRows = 16 * kColumnWarps<kTiles>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
    const uint4* keys = reinterpret_cast<const uint4*>(page) +
                        (kRows * (warp % kKeyWarps<kTiles>)+quad) * (kDim / 16) + t;
    int best[kWarpTiles<kTiles>][2];
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) best[j][0] = best[j][1] = INT_MIN;
#pragma unroll
    for (int row = 0; row < kRows; row += 16) {
      uint4 a[2], b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        a[i] = keys[row * (kDim / 16) + 4 * i], b[i] = keys[(row + 8) * (kDim / 16) + 4 * i];
#pragma unroll
      for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
        int32_t sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t(&q)[4] = query.chunk[j][i];
          mma_m16n8k32_s8(sum, {a[i].x, b[i].x, a[i].y, b[i].y}, {q[0], q[1]});
          mma_m16n8k32_s8(sum, {a[i].z, b[i].z, a[i].w, b[i].w}, {q[2], q[3]});
        }
        best[j][0] = max(best[j][0], max(sum[0], sum[2]));
        best[j][1] = max(best[j][1], max(sum[1], sum[3]));
      }
    }
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        best[j][0] = max(best[j][0], __shfl_xor_sync(0xffffffffu, best[j][0], step));
        best[j][1] = max(best[j][1], __shfl_xor_sync(0xffffffffu, best[j][1], step));
      }
      store_maxima<kTiles>(scale * static_cast<float>(best[j][0]),
                           scale * static_cast<float>(best[j][1]), j, maxima);
    }
  }
};

// --- the settling of candidates

constexpr int kCluster = 8, kWarps = 8, kThreads = kWarps * 32;
constexpr int kMost = kIndexDecodeMaxCandidates,
              kMostOwn = kMost / kCluster;  // candidates; of one CTA

struct alignas(16) RescoreShared {
  SelectShared<kMost> select;
  int32_t block[kMost], page[kMost];  // candidates, ids ascending
  uint32_t is_candidate[kSelectMaxBlocks / 32];
  float warp_max[kMostOwn][kWarps];
  float bound_warp[kWarps];
  float query_stat[3];    // scale, |qi|, |q8 - qi|
  float score[kMost];     // in CTA 0: of all candidates
  float bound[kCluster];  // in CTA 0: largest upper bound of the blocks left out
  int32_t chosen[kMost];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Scale, norm and rounding error of the row's int8 codes; norms a little up.
__device__ __forceinline__ void query_statistics(const void* qi_TRX, int64_t row,
                                                 RescoreShared& shared) {
  constexpr float kUp = 1.0f + 0x1p-16f;
  const int lane = threadIdx.x % 32;
  const uint2 packed = reinterpret_cast<const uint2*>(qi_TRX)[row * (kDim / 4) + lane];
  const float x[4] = {unpack_bf16_low(packed.x), unpack_bf16_high(packed.x),
                      unpack_bf16_low(packed.y), unpack_bf16_high(packed.y)};
  float largest = 0, norm2 = 0, error2 = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = fmaxf(largest, finite_abs(x[i]));
  const float scale = __fdiv_rn(warp_max(largest), 127.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float difference = fmaf(scale, static_cast<float>(code_of(x[i], scale)), -x[i]);
    norm2 += x[i] * x[i];
    error2 += difference * difference;
  }
  norm2 = warp_sum(norm2);
  error2 = warp_sum(error2);
  if (lane == 0) {
    shared.query_stat[0] = scale;
    shared.query_stat[1] = sqrtf(norm2) * kUp;
    shared.query_stat[2] = sqrtf(error2) * kUp;
  }
}

// bf16 scores of this CTA's candidates.
__device__ __forceinline__ void rescore(const IndexRescoreParams& p, int64_t row, int count,
                                        int rank, RescoreShared& shared) {
  const int warp = threadIdx.x / 32;
  uint32_t query[4][4];
  index_scan::load_query_row(static_cast<const uint4*>(p.scan.qi_TRX) + row * (kDim / 8), query);
#pragma unroll 4
  for (int own = 0; own < (count - rank + kCluster - 1) / kCluster; ++own) {
    const int64_t key = int64_t{shared.page[own * kCluster + rank]} * kBlock + 16 * warp;
    const float best = index_scan::best_of_16_keys(
        static_cast<const uint4*>(p.scan.x_PBX) + key * (kDim / 8), query);
    if (threadIdx.x % 32 == 0) shared.warp_max[own][warp] = best;
  }
}

// Largest upper bound of the bf16 scores of the blocks that are no candidates; this CTA's share.
__device__ __forceinline__ float bound_others(const IndexRescoreParams& p, const float* scores,
                                              const int32_t* pages, int history, int rank,
                                              const RescoreShared& shared) {
  const float scale = shared.query_stat[0], norm = shared.query_stat[1],
              error = shared.query_stat[2];
  float bound = -INFINITY;
  for (int block = threadIdx.x * kCluster + rank; block < history; block += kThreads * kCluster) {
    if (shared.is_candidate[block / 32] >> (block % 32) & 1) continue;
    const int page = pages[block];
    const float e = p.keys.error_P[page], n = p.keys.norm_P[page];
    const float here =
        scale * __ldcg(scores + block) + (norm * e + error * (n + e) + 0x1p-14f * norm * n);
    bound = isnan(here) ? INFINITY : fmaxf(bound, here);  // unknown: no certificate
  }
  return bound;
}

// CTA 0: the best `wanted` of the candidates; ids ascend with the place. Returns the score of the
// last.
__device__ __forceinline__ void choose(int count, int wanted, int32_t* ids, RescoreShared& shared,
                                       float& last) {
  const int thread = threadIdx.x;
  int rank = kMost;
  if (thread < count) {
    const uint64_t own = select_key(shared.score[thread], shared.block[thread]);
    rank = 0;
    for (int i = 0; i < count; ++i)
      rank += select_key(shared.score[i], shared.block[i]) > own ? 1 : 0;
    shared.chosen[thread] = rank < wanted ? 1 : 0;
    if (rank == wanted - 1) shared.bound_warp[0] = shared.score[thread];
  }
  __syncthreads();
  if (rank < wanted) {
    int place = 0;
    for (int i = 0; i < thread; ++i) place += shared.chosen[i];
    ids[place] = shared.block[thread];
  }
  last = shared.bound_warp[0];
}

__global__ __cluster_dims__(kCluster, 1, 1)
    __launch_bounds__(kThreads, 2) void index_decode_rescore_kernel(const IndexRescoreParams p) {
  extern __shared__ __align__(128) uint8_t scratch[];
  __shared__ RescoreShared shared;
  const int rank = static_cast<int>(cluster_cta_rank()), thread = threadIdx.x;
  const int64_t item = blockIdx.x / kCluster;
  const int token = static_cast<int>(item / p.scan.groups),
            group = static_cast<int>(item % p.scan.groups);
  int n = 0, high = p.scan.num_seqs - 1;
  while (n < high) {
    const int middle = (n + high + 1) / 2;
    if (p.scan.cu_q[middle] <= token)
      n = middle;
    else
      high = middle - 1;
  }
  const int position = p.scan.seq_lens[n] - p.scan.cu_q[n + 1] + token;
  const int history = position < 0 ? -1 : position / kBlock;  // blocks before the own one
  const int wanted = min(p.scan.topk - 1, history), count = min(p.candidates, history);
  const int32_t* pages = p.scan.page_table + n * p.scan.page_stride;
  int32_t* ids = p.ids_RTK + (int64_t{group} * p.num_queries + token) * p.scan.topk;
  cluster_arrive();
  for (int i = thread; i < kSelectMaxBlocks / 32; i += kThreads) shared.is_candidate[i] = 0;
  grid_dependency_wait();
  grid_dependency_launch();

  if (rank == 0 && thread >= max(wanted, 0) && thread < p.scan.topk)
    ids[thread] = thread == wanted ? history : -1;
  const bool choice = wanted > 0 && history > wanted;
  if (!choice) {
    if (rank == 0 && thread < wanted) ids[thread] = thread;
    cluster_wait();
    return;  // the whole cluster
  }
  const float* scores = p.scan.scores_TRM + item * p.scan.score_stride;
  if (thread / 32 == 7) query_statistics(p.scan.qi_TRX, item, shared);
  __syncthreads();
  select_blocks(
      scores, history, count, scratch, shared.select, thread, [] { __syncthreads(); },
      [&](int block) { return pages[block]; }, [](int) {},
      [&](int place, int block, int page) {
        shared.block[place] = block;
        shared.page[place] = page;
        atomicOr(&shared.is_candidate[block / 32], 1u << (block % 32));
      });
  __syncthreads();
  rescore(p, item, count, rank, shared);
  float bound = -INFINITY;
  if (p.uncertified_N != nullptr)
    bound = warp_max(bound_others(p, scores, pages, history, rank, shared));
  if (thread % 32 == 0) shared.bound_warp[thread / 32] = bound;
  __syncthreads();
  cluster_wait();  // CTA 0 has started
  const int own = (count - rank + kCluster - 1) / kCluster;
  if (thread < own) {
    float best = shared.warp_max[thread][0];
    for (int w = 1; w < kWarps; ++w) best = fmaxf(best, shared.warp_max[thread][w]);
    cluster_store_u32(cluster_address(&shared.score[thread * kCluster + rank], 0),
                      __float_as_uint(best));
  }
  if (thread == 32) {
    for (int w = 1; w < kWarps; ++w) bound = fmaxf(bound, shared.bound_warp[w]);
    bound = fmaxf(bound, shared.bound_warp[0]);
    cluster_store_u32(cluster_address(&shared.bound[rank], 0), __float_as_uint(bound));
  }
  cluster_arrive();
  cluster_wait();
  if (rank != 0) return;
  float last = 0;
  choose(count, wanted, ids, shared, last);
  if (thread == 0 && p.uncertified_N != nullptr && history > count) {
    float largest = shared.bound[0];
    for (int c = 1; c < kCluster; ++c) largest = fmaxf(largest, shared.bound[c]);
    if (!(largest < last)) atomicAdd(&p.uncertified_N[n], 1);
  }
}

}  // namespace

void index_decode_scores8(const IndexDecodeParams& params, int64_t max_q_len,
                          const IndexDecodeTuning& tuning, Stream stream) {
  const ProfileRange range("index_decode_scores8");
  M3_CHECK(params.scale_P != nullptr,
           "decode index: int8 keys need scale_P [P], one scale per page");
  index_scan::launch_scan<Int8Keys>(params, max_q_len, tuning, stream);
}

void index_decode_rescore(const IndexRescoreParams& params, int64_t max_blocks, bool dependent,
                          Stream stream) {
  const ProfileRange range("index_decode_rescore");
  if (params.num_queries == 0) return;
  M3_CHECK(params.candidates >= params.scan.topk - 1 && params.candidates <= kMost,
           "decode index: {} candidates for topk {}, want {} to {}", params.candidates,
           params.scan.topk, params.scan.topk - 1, kMost);
  const int64_t bytes = select_scratch_bytes(max_blocks, kMost);
  M3_CUDA_CHECK(cudaFuncSetAttribute(index_decode_rescore_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(params.num_queries * params.scan.groups * kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, index_decode_rescore_kernel, params));
}

void index_decode_exact(const IndexRescoreParams& params, int64_t max_q_len, int64_t max_blocks,
                        Stream stream) {
  const ProfileRange range("index_decode_exact");
  IndexDecodeParams scan = params.scan;
  scan.wanted_N = params.uncertified_N;
  index_decode_scores(scan, max_q_len, {}, stream);
  index_decode_choose({.scores_TRM = scan.scores_TRM,
                       .score_stride = scan.score_stride,
                       .cu_q = scan.cu_q,
                       .seq_lens = scan.seq_lens,
                       .num_seqs = scan.num_seqs,
                       .groups = scan.groups,
                       .topk = scan.topk,
                       .num_queries = params.num_queries,
                       .ids_RTK = params.ids_RTK,
                       .wanted_N = params.uncertified_N},
                      max_blocks, false, stream);
}

}  // namespace m3
