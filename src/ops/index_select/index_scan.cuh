// Scan of a decode step: block scores of the history pages of all sequences, for bf16 keys
// (index_select_decode_sm90.cu) and 8-bit keys (index_decode8_sm90.cu). The format supplies a
// page's bytes, the queries' fragments and the scores of a warp's keys.
//
// Persistent, one CTA per SM. The history pages of all sequences form one list; a CTA takes a
// contiguous share of it.
//   warp 8      producer: one bulk copy a page into a ring (96 KB in flight)
//   warps 0-7   warp w multiplies keys 16w..16w+15 of every page with the sequence's index queries:
//               mma.sync, keys = M, (token, group) = N. Max over its keys by shuffles; the warps'
//               maxima meet in shared memory and are written 4 to 16 pages at a time.
// Lengths, cu_q and page tables are inputs of the whole step: they are read before the wait for the
// kernel before, queries and keys after it.
// A page's rows are a power of two apart, so fragments are not loaded in the order of the index
// dimension: lane t of a quad takes the 16-byte chunks t, t+4, .. of its row, of key and query
// alike. The sum over the dimension does not care, and both operands need no shuffle (2-way bank
// conflicts: 64 of the 128 bytes a clock, an eighth of which is needed). Shared memory: ring,
// maxima [2][slots][8 or 4 warps][columns], barriers, first page of every sequence. FLOP:
// 2*128*128*columns a page. Memory bound from 1 to 16 query tokens.
#pragma once
#include <algorithm>

#include "hopper/bulk_copy.cuh"
#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "ops/index_select/index_select_decode.h"
#include "tensor/cuda_check.h"

namespace m3::index_scan {

using namespace hopper;

constexpr int kBlock = 128, kDim = 128;
constexpr int kWarps = 8;
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kMaxStages = 12;

// Eight tiles of queries are too many registers for one warp: then two warps share 32 keys, each
// with half of the tiles.
template <int kTiles>
constexpr int kColumnWarps = kTiles > 4 ? 2 : 1;
template <int kTiles>
constexpr int kWarpTiles = kTiles / kColumnWarps<kTiles>;
template <int kTiles>
constexpr int kKeyWarps = kWarps / kColumnWarps<kTiles>;

template <int kTiles>
constexpr int kSlots = kTiles == 1   ? 16
                       : kTiles <= 4 ? 8
                                     : 4;  // pages whose maxima are written together
template <int kTiles>
constexpr int kSlotFloats =
    kKeyWarps<kTiles> * 8 * kTiles + 2;  // + 2: slots fall on different banks

// Pages to score for a sequence: every block before the newest token's own one, if any row has a
// choice.
__device__ __forceinline__ int history_pages(const IndexDecodeParams& p, int n) {
  const int length = p.seq_lens[n], queries = p.cu_q[n + 1] - p.cu_q[n];
  if (length <= 0 || queries <= 0 || (p.wanted_N != nullptr && p.wanted_N[n] == 0)) return 0;
  const int newest = (length - 1) / kBlock;
  return p.score_all || newest + 1 > p.topk ? newest : 0;
}

// first_page[n] = history pages of the sequences before n; n = num_seqs gives the total.
__device__ __forceinline__ void list_pages(const IndexDecodeParams& p, int* first_page) {
  for (int n = threadIdx.x; n < p.num_seqs; n += kThreads) {
    first_page[n + 1] = history_pages(p, n);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int carry = 0;
    for (int base = 0; base < p.num_seqs; base += 32) {
      const int n = base + static_cast<int>(threadIdx.x);
      int sum = n < p.num_seqs ? first_page[n + 1] : 0;
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, step);
        if (static_cast<int>(threadIdx.x) >= step) sum += below;
      }
      if (n < p.num_seqs) first_page[n + 1] = carry + sum;
      carry += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (threadIdx.x == 0) first_page[0] = 0;
  }
  __syncthreads();
}

// The sequence that owns page `at` of the list.
__device__ __forceinline__ int sequence_of(const int* first_page, int num_seqs, int at) {
  int low = 0, high = num_seqs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_page[middle] <= at)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ int physical_page(const IndexDecodeParams& p, const int* first_page,
                                             int at, int end) {
  if (at >= end) return 0;
  const int n = sequence_of(first_page, p.num_seqs, at);
  return p.page_table[n * p.page_stride + (at - first_page[n])];
}

template <typename Format>
__device__ __forceinline__ void produce(const IndexDecodeParams& p, const int* first_page,
                                        int begin, int end, uint8_t* ring, float* scales,
                                        uint64_t* full, uint64_t* empty, int stages) {
  const int lane = threadIdx.x % 32;
  const uint8_t* x = static_cast<const uint8_t*>(p.x_PBX);
  int stage = 0, round = 0;
  int next_page = physical_page(p, first_page, begin + lane, end);
  grid_dependency_wait();  // the new tokens' keys and queries come from the kernel before
  for (int base = begin; base < end; base += 32) {
    const int page = next_page;
    const float scale = Format::kScaled ? p.scale_P[page] : 1.0f;
    next_page =
        physical_page(p, first_page, base + 32 + lane, end);  // arrives while this 32 are copied
    const int count = min(32, end - base);
    for (int i = 0; i < count; ++i) {
      const int64_t offset = int64_t{__shfl_sync(0xffffffffu, page, i)} * Format::kPageBytes;
      const float page_scale = __shfl_sync(0xffffffffu, scale, i);
      if (lane == 0) {
        if (round > 0) mbarrier_wait(&empty[stage], (round - 1) & 1);
        if constexpr (Format::kScaled) scales[stage] = page_scale;
        mbarrier_arrive_expect_tx(&full[stage], Format::kPageBytes);
        bulk_load(ring + stage * Format::kPageBytes, x + offset, Format::kPageBytes, &full[stage],
                  L2Policy::kEvictFirst);
      }
      if (++stage == stages) stage = 0, ++round;
    }
  }
}

struct Rows {
  int first, columns;  // first query row of a sequence; its rows x groups
};

__device__ __forceinline__ Rows rows_of(const IndexDecodeParams& p, int n) {
  const int first = p.cu_q[n];
  return {first, (p.cu_q[n + 1] - first) * p.groups};
}

// Maxima of `count` pages, the first of which is block `block` of the sequence, to global memory.
template <int kTiles>
__device__ __forceinline__ void write_scores(const IndexDecodeParams& p, Rows rows, int block,
                                             int count, const float* maxima) {
  for (int i = threadIdx.x; i < rows.columns * kSlots<kTiles>; i += kWarps * 32) {
    const int column = i / kSlots<kTiles>, slot = i % kSlots<kTiles>;
    if (slot >= count) continue;
    const float* values = maxima + slot * kSlotFloats<kTiles> + column;
    float best = values[0];
#pragma unroll
    for (int w = 1; w < kKeyWarps<kTiles>; ++w) best = fmaxf(best, values[w * 8 * kTiles]);
    p.scores_TRM[(int64_t{rows.first} * p.groups + column) * p.score_stride + block + slot] = best;
  }
}

// Maxima of a warp's columns 8j + 2t and the next of `tile` (in every lane of its column) to its
// place.
template <int kTiles>
__device__ __forceinline__ void store_maxima(float even, float odd, int tile, float* maxima) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane >= 4) return;
  const int column = 8 * (warp / kKeyWarps<kTiles> * kWarpTiles<kTiles> + tile) + 2 * lane;
  // + 0 makes -0 a +0
  *reinterpret_cast<float2*>(maxima + warp % kKeyWarps<kTiles> * 8 * kTiles + column) = {
      even + 0.0f, odd + 0.0f};
}

template <typename Format, int kTiles>
__device__ __forceinline__ void consume(const IndexDecodeParams& p, const int* first_page,
                                        int begin, int end, const uint8_t* ring,
                                        const float* scales, float* maxima, uint64_t* full,
                                        uint64_t* empty, int stages) {
  constexpr uint32_t kConsumerBarrier = 1;
  typename Format::template Query<kWarpTiles<kTiles>> query;
  int n = sequence_of(first_page, p.num_seqs, begin);
  Rows rows = rows_of(p, n);
  grid_dependency_wait();
  Format::template load_queries<kTiles>(p, rows, query);
  int stage = 0, round = 0, slot = 0, half = 0;
  for (int at = begin; at < end; ++at) {
    mbarrier_wait(&full[stage], round & 1);
    Format::template score_keys<kTiles>(
        ring + stage * Format::kPageBytes, query, scales[stage],
        maxima + (half * kSlots<kTiles> + slot) * kSlotFloats<kTiles>);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[stage]);
    if (++stage == stages) stage = 0, ++round;
    ++slot;
    const bool last_of_sequence = at + 1 == end || at + 1 == first_page[n + 1];
    if (slot == kSlots<kTiles> || last_of_sequence) {
      // Two halves take turns, so one barrier is enough: whoever passes the next one has written
      // this.
      named_barrier_sync(kConsumerBarrier, kWarps * 32);
      write_scores<kTiles>(p, rows, at + 1 - slot - first_page[n], slot,
                           maxima + half * kSlots<kTiles> * kSlotFloats<kTiles>);
      slot = 0;
      half ^= 1;
    }
    if (last_of_sequence && at + 1 < end) {
      n = sequence_of(first_page, p.num_seqs, at + 1);
      rows = rows_of(p, n);
      Format::template load_queries<kTiles>(p, rows, query);
    }
  }
}

template <typename Format, int kTiles>
constexpr int64_t smem_bytes(int stages, int num_seqs) {
  return int64_t{stages} * Format::kPageBytes +
         int64_t{2} * kSlots<kTiles> * kSlotFloats<kTiles> * 4 + kMaxStages * (2 * 8 + 4) +
         (num_seqs + 1) * 4;
}

template <typename Format, int kTiles>
__global__ __launch_bounds__(kThreads, 1) void index_scan_kernel(const IndexDecodeParams p,
                                                                 int stages) {
  extern __shared__ __align__(128) uint8_t smem[];
  uint8_t* ring = smem;
  float* maxima = reinterpret_cast<float*>(ring + stages * Format::kPageBytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(maxima + 2 * kSlots<kTiles> * kSlotFloats<kTiles>);
  uint64_t* empty = full + kMaxStages;
  float* scales = reinterpret_cast<float*>(empty + kMaxStages);
  int* first_page = reinterpret_cast<int*>(scales + kMaxStages);

  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], kWarps);
    }
    mbarrier_init_fence();
  }
  list_pages(p, first_page);
  grid_dependency_launch();

  const int64_t total = first_page[p.num_seqs];
  const int begin = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) {
    grid_dependency_wait();  // a grid must not end before the one it depends on: others wait for
                             // this one only
    return;
  }
  if (threadIdx.x / 32 == kWarps) {
    produce<Format>(p, first_page, begin, end, ring, scales, full, empty, stages);
  } else {
    consume<Format, kTiles>(p, first_page, begin, end, ring, scales, maxima, full, empty, stages);
  }
}

template <typename Format, int kTiles>
void launch_scan(const IndexDecodeParams& params, const IndexDecodeTuning& tuning,
                 cudaStream_t stream) {
  const auto kernel = index_scan_kernel<Format, kTiles>;
  int device = 0, sms = 0, sm_bytes = 0, reserved = 0;
  M3_CUDA_CHECK(cudaGetDevice(&device));
  M3_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  M3_CUDA_CHECK(
      cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  M3_CUDA_CHECK(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device));
  // Shares are equal, so two of these CTAs on one SM would take twice as long as the others; a
  // little over half of the SM's memory keeps them apart and leaves room for a CTA of the
  // attention.
  const int64_t bytes = std::max<int64_t>(
      smem_bytes<Format, kTiles>(tuning.stages, params.num_seqs), sm_bytes / 2 - reserved + 16);
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tuning.ctas > 0 ? tuning.ctas : sms));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = tuning.dependent ? 1 : 0;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params, tuning.stages));
}

template <typename Format>
void launch_scan(const IndexDecodeParams& params, int64_t max_q_len,
                 const IndexDecodeTuning& tuning, Stream stream) {
  if (params.num_seqs == 0) return;
  M3_CHECK(params.num_seqs <= 2048, "decode index: {} sequences, want at most 2048",
           params.num_seqs);
  M3_CHECK(tuning.stages >= 2 && tuning.stages <= kMaxStages,
           "decode index: {} stages, want 2 to {}", tuning.stages, kMaxStages);
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const int64_t columns = max_q_len * params.groups;
  if (columns <= 8) return launch_scan<Format, 1>(params, tuning, handle);
  if (columns <= 32) return launch_scan<Format, 4>(params, tuning, handle);
  M3_CHECK(columns <= kIndexDecodeMaxColumns,
           "decode index: {} groups x {} query tokens, want at most {} columns", params.groups,
           max_q_len, kIndexDecodeMaxColumns);
  launch_scan<Format, 8>(params, tuning, handle);
}

}  // namespace m3::index_scan
