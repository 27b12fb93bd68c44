// Block scores of a decode step (hopper.md §6.6), and the choice of blocks from them.
//
// index_decode_scores: persistent, one CTA per SM. The history pages of all sequences form one list; a
// CTA takes a contiguous share of it.
//   warp 8      producer: one bulk copy of 32 KB a page into a ring (192 KB with 6 stages)
//   warps 0-7   warp w multiplies keys 16w..16w+15 of every page with the sequence's index queries:
//               mma.sync m16n8k16, keys = M, (token, group) = N. Max over its keys by shuffles; the
//               warps' maxima meet in shared memory and are written 4 to 16 pages at a time.
// Lengths, cu_q and page tables are inputs of the whole step: they are read before the wait for the
// kernel before, queries and keys after it.
// A page's rows are 256 bytes apart, so fragments are not loaded in the order of the index dimension:
// lane t of a quad takes the 16-byte chunks t, t+4, t+8, t+12 of its row, of key and query alike. The
// sum over the dimension does not care, and both operands need no shuffle (2-way bank conflicts: 64 of
// the 128 bytes a clock, an eighth of which is needed).
// Shared memory: ring, maxima [2][slots][8 or 4 warps][columns], barriers, first page of every sequence.
// FLOP: 2*128*128*columns a page; bytes: 32 KB a page. Memory bound from 1 to 16 query tokens.
#include <algorithm>

#include "hopper/bulk_copy.cuh"
#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "ops/index_select/index_select_decode.h"
#include "ops/index_select/select_blocks.cuh"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

using namespace hopper;

constexpr int kBlock = 128, kDim = 128;
constexpr int kPageBytes = kBlock * kDim * 2;
constexpr int kWarps = 8;
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kMaxStages = 6;

// Eight tiles of queries are too many registers for one warp: then two warps share 32 keys, each with
// half of the tiles.
template <int kTiles>
constexpr int kColumnWarps = kTiles > 4 ? 2 : 1;
template <int kTiles>
constexpr int kWarpTiles = kTiles / kColumnWarps<kTiles>;
template <int kTiles>
constexpr int kKeyWarps = kWarps / kColumnWarps<kTiles>;

template <int kTiles>
constexpr int kSlots = kTiles == 1 ? 16 : kTiles <= 4 ? 8 : 4;  // pages whose maxima are written together
template <int kTiles>
constexpr int kSlotFloats = kKeyWarps<kTiles> * 8 * kTiles + 2;  // + 2: slots fall on different banks

// Pages to score for a sequence: every block before the newest token's own one, if any row has a choice.
__device__ __forceinline__ int history_pages(int length, int queries, int topk, bool score_all) {
  if (length <= 0 || queries <= 0) return 0;
  const int newest = (length - 1) / kBlock;
  return score_all || newest + 1 > topk ? newest : 0;
}

// first_page[n] = history pages of the sequences before n; n = num_seqs gives the total.
__device__ __forceinline__ void list_pages(const IndexDecodeParams& p, int* first_page) {
  for (int n = threadIdx.x; n < p.num_seqs; n += kThreads) {
    first_page[n + 1] = history_pages(p.seq_lens[n], p.cu_q[n + 1] - p.cu_q[n], p.topk, p.score_all);
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
    if (first_page[middle] <= at) low = middle; else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ int physical_page(const IndexDecodeParams& p, const int* first_page, int at, int end) {
  if (at >= end) return 0;
  const int n = sequence_of(first_page, p.num_seqs, at);
  return p.page_table[n * p.page_stride + (at - first_page[n])];
}

__device__ __forceinline__ void produce(const IndexDecodeParams& p, const int* first_page, int begin, int end,
                                        uint8_t* ring, uint64_t* full, uint64_t* empty, int stages) {
  const int lane = threadIdx.x % 32;
  const uint8_t* x = static_cast<const uint8_t*>(p.x_PBX);
  int stage = 0, round = 0;
  int next_page = physical_page(p, first_page, begin + lane, end);
  grid_dependency_wait();  // the new tokens' keys and queries come from the kernel before
  for (int base = begin; base < end; base += 32) {
    const int page = next_page;
    next_page = physical_page(p, first_page, base + 32 + lane, end);  // arrives while this 32 are copied
    const int count = min(32, end - base);
    for (int i = 0; i < count; ++i) {
      const int64_t offset = int64_t{__shfl_sync(0xffffffffu, page, i)} * kPageBytes;
      if (lane == 0) {
        if (round > 0) mbarrier_wait(&empty[stage], (round - 1) & 1);
        mbarrier_arrive_expect_tx(&full[stage], kPageBytes);
        bulk_load(ring + stage * kPageBytes, x + offset, kPageBytes, &full[stage], L2Policy::kEvictFirst);
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

template <int kTiles>
__device__ __forceinline__ void load_queries(const IndexDecodeParams& p, Rows rows,
                                             uint32_t (&query)[kWarpTiles<kTiles>][4][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
    const int column = 8 * (warp / kKeyWarps<kTiles> * kWarpTiles<kTiles> + j) + quad;
    const uint4* row = static_cast<const uint4*>(p.qi_TRX) + (int64_t{rows.first} * p.groups + column) * (kDim / 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 chunk = column < rows.columns ? row[4 * i + t] : uint4{0, 0, 0, 0};
      query[j][i][0] = chunk.x, query[j][i][1] = chunk.y, query[j][i][2] = chunk.z, query[j][i][3] = chunk.w;
    }
  }
}

// Largest score of the warp's 16 (or 32) keys for each of its columns.
// fmaxf drops NaN, so a NaN key spoils only itself; + 0 makes -0 a +0.
template <int kTiles>
__device__ __forceinline__ void score_keys(const uint8_t* page, const uint32_t (&query)[kWarpTiles<kTiles>][4][4],
                                           float* maxima) {
  constexpr int kRows = 16 * kColumnWarps<kTiles>;  // keys of a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
  const int key_warp = warp % kKeyWarps<kTiles>, first_tile = warp / kKeyWarps<kTiles> * kWarpTiles<kTiles>;
  const uint4* keys = reinterpret_cast<const uint4*>(page) + (kRows * key_warp + quad) * (kDim / 8) + t;
  float best[kWarpTiles<kTiles>][2];
#pragma unroll
  for (int j = 0; j < kWarpTiles<kTiles>; ++j) best[j][0] = best[j][1] = -INFINITY;
#pragma unroll
  for (int row = 0; row < kRows; row += 16) {
    uint4 a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = keys[row * (kDim / 8) + 4 * i], b[i] = keys[(row + 8) * (kDim / 8) + 4 * i];
#pragma unroll
    for (int j = 0; j < kWarpTiles<kTiles>; ++j) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma_m16n8k16_bf16(sum, {a[i].x, b[i].x, a[i].y, b[i].y}, {query[j][i][0], query[j][i][1]});
        mma_m16n8k16_bf16(sum, {a[i].z, b[i].z, a[i].w, b[i].w}, {query[j][i][2], query[j][i][3]});
      }
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
    if (quad == 0) {
      *reinterpret_cast<float2*>(maxima + key_warp * 8 * kTiles + 8 * (first_tile + j) + 2 * t) = {
          best[j][0] + 0.0f, best[j][1] + 0.0f};
    }
  }
}

// Maxima of `count` pages, the first of which is block `block` of the sequence, to global memory.
template <int kTiles>
__device__ __forceinline__ void write_scores(const IndexDecodeParams& p, Rows rows, int block, int count,
                                             const float* maxima) {
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

template <int kTiles>
__device__ __forceinline__ void consume(const IndexDecodeParams& p, const int* first_page, int begin, int end,
                                        const uint8_t* ring, float* maxima, uint64_t* full, uint64_t* empty,
                                        int stages) {
  constexpr uint32_t kConsumerBarrier = 1;
  uint32_t query[kWarpTiles<kTiles>][4][4];
  int n = sequence_of(first_page, p.num_seqs, begin);
  Rows rows = rows_of(p, n);
  grid_dependency_wait();
  load_queries<kTiles>(p, rows, query);
  int stage = 0, round = 0, slot = 0, half = 0;
  for (int at = begin; at < end; ++at) {
    mbarrier_wait(&full[stage], round & 1);
    score_keys<kTiles>(ring + stage * kPageBytes, query,
                       maxima + (half * kSlots<kTiles> + slot) * kSlotFloats<kTiles>);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[stage]);
    if (++stage == stages) stage = 0, ++round;
    ++slot;
    const bool last_of_sequence = at + 1 == end || at + 1 == first_page[n + 1];
    if (slot == kSlots<kTiles> || last_of_sequence) {
      // Two halves take turns, so one barrier is enough: whoever passes the next one has written this.
      named_barrier_sync(kConsumerBarrier, kWarps * 32);
      write_scores<kTiles>(p, rows, at + 1 - slot - first_page[n], slot,
                           maxima + half * kSlots<kTiles> * kSlotFloats<kTiles>);
      slot = 0;
      half ^= 1;
    }
    if (last_of_sequence && at + 1 < end) {
      n = sequence_of(first_page, p.num_seqs, at + 1);
      rows = rows_of(p, n);
      load_queries<kTiles>(p, rows, query);
    }
  }
}

template <int kTiles>
constexpr int64_t smem_bytes(int stages, int num_seqs) {
  return int64_t{stages} * kPageBytes + int64_t{2} * kSlots<kTiles> * kSlotFloats<kTiles> * 4 + 2 * kMaxStages * 8 +
         (num_seqs + 1) * 4;
}

template <int kTiles>
__global__ __launch_bounds__(kThreads, 1) void index_decode_scores_kernel(const IndexDecodeParams p, int stages) {
  extern __shared__ __align__(128) uint8_t smem[];
  uint8_t* ring = smem;
  float* maxima = reinterpret_cast<float*>(ring + stages * kPageBytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(maxima + 2 * kSlots<kTiles> * kSlotFloats<kTiles>);
  uint64_t* empty = full + kMaxStages;
  int* first_page = reinterpret_cast<int*>(empty + kMaxStages);

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
    grid_dependency_wait();  // a grid must not end before the one it depends on: others wait for this one only
    return;
  }
  if (threadIdx.x / 32 == kWarps) {
    produce(p, first_page, begin, end, ring, full, empty, stages);
  } else {
    consume<kTiles>(p, first_page, begin, end, ring, maxima, full, empty, stages);
  }
}

// One CTA per (query row, group).
__global__ __launch_bounds__(kSelectThreads) void index_decode_choose_kernel(const IndexChooseParams p) {
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ SelectShared shared;
  const int row = blockIdx.x, group = blockIdx.y, thread = threadIdx.x;
  int low = 0, high = p.num_seqs - 1;  // the last sequence that begins at or before the row
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_q[middle] <= row) low = middle; else high = middle - 1;
  }
  const int position = p.seq_lens[low] - p.cu_q[low + 1] + row;
  const int own = position < 0 ? -1 : position / kBlock;
  const int wanted = min(p.topk - 1, own);
  const float* scores = p.scores_TRM + (int64_t{row} * p.groups + group) * p.score_stride;
  const int64_t at = (int64_t{group} * p.num_queries + row) * p.topk;
  const auto emit = [&](int place, int block, int) {
    p.ids_RTK[at + place] = block;
    if (p.sel_scores_RTK != nullptr) p.sel_scores_RTK[at + place] = __ldcg(scores + block);
  };
  grid_dependency_wait();
  grid_dependency_launch();
  if (wanted > 0 && own > wanted) {
    select_blocks(scores, own, wanted, smem, shared, thread, [] { __syncthreads(); }, [](int) { return 0; },
                  [](int) {}, emit);
  } else if (thread < wanted) {
    emit(thread, thread, 0);
  }
  if (thread >= max(wanted, 0) && thread < p.topk) {
    const int id = thread == wanted ? own : -1;
    p.ids_RTK[at + thread] = id;
    if (p.sel_scores_RTK != nullptr) p.sel_scores_RTK[at + thread] = id >= 0 ? INFINITY : -INFINITY;
  }
}

template <int kTiles>
void launch_scores(const IndexDecodeParams& params, const IndexDecodeTuning& tuning, cudaStream_t stream) {
  const auto kernel = index_decode_scores_kernel<kTiles>;
  int device = 0, sms = 0, sm_bytes = 0, reserved = 0;
  M3_CUDA_CHECK(cudaGetDevice(&device));
  M3_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  M3_CUDA_CHECK(cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  M3_CUDA_CHECK(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device));
  // Shares are equal, so two of these CTAs on one SM would take twice as long as the others; a little
  // over half of the SM's memory keeps them apart and leaves room for a CTA of the attention.
  const int64_t bytes = std::max<int64_t>(smem_bytes<kTiles>(tuning.stages, params.num_seqs), sm_bytes / 2 - reserved + 16);
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
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

}  // namespace

std::string index_decode_supports(const MsaGeometry& g, int64_t max_q_len, int64_t max_blocks) {
  if (g.index_dim != kDim) return fmt::format("index_dim {} (wants {})", g.index_dim, kDim);
  if (g.block != kBlock) return fmt::format("block {} (wants {})", g.block, kBlock);
  if (g.local != 1 || g.init != 0) return fmt::format("local {} and init {} (wants 1 and 0)", g.local, g.init);
  if (g.topk > kSelectMaxTopk) return fmt::format("topk {} (wants at most {})", g.topk, kSelectMaxTopk);
  if (max_q_len * g.groups > kIndexDecodeMaxColumns) {
    return fmt::format("{} groups x {} query tokens (wants at most {})", g.groups, max_q_len, kIndexDecodeMaxColumns);
  }
  if (max_blocks > kSelectMaxBlocks) return fmt::format("{} blocks (wants at most {})", max_blocks, kSelectMaxBlocks);
  return "";
}

int64_t index_decode_score_stride(int64_t max_blocks) { return (max_blocks + 31) / 32 * 32; }

void index_decode_scores(const IndexDecodeParams& params, int64_t max_q_len, const IndexDecodeTuning& tuning,
                         Stream stream) {
  if (params.num_seqs == 0) return;
  M3_CHECK(params.num_seqs <= 2048, "decode index: {} sequences, want at most 2048", params.num_seqs);
  M3_CHECK(tuning.stages >= 2 && tuning.stages <= kMaxStages, "decode index: {} stages, want 2 to {}", tuning.stages,
           kMaxStages);
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const int64_t columns = max_q_len * params.groups;
  if (columns <= 8) return launch_scores<1>(params, tuning, handle);
  if (columns <= 16) return launch_scores<2>(params, tuning, handle);
  if (columns <= 32) return launch_scores<4>(params, tuning, handle);
  M3_CHECK(columns <= kIndexDecodeMaxColumns, "decode index: {} groups x {} query tokens, want at most {} columns",
           params.groups, max_q_len, kIndexDecodeMaxColumns);
  launch_scores<8>(params, tuning, handle);
}

void index_decode_choose(const IndexChooseParams& params, int64_t max_blocks, bool dependent, Stream stream) {
  if (params.num_queries == 0) return;
  const int64_t bytes = select_scratch_bytes(max_blocks, params.topk);
  M3_CUDA_CHECK(cudaFuncSetAttribute(index_decode_choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(params.num_queries), static_cast<unsigned>(params.groups));
  config.blockDim = dim3(kSelectThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, index_decode_choose_kernel, params));
}

}  // namespace m3
