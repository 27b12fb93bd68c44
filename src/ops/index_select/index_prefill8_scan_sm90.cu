// Candidates of a prefill selection with int8 index keys (index_prefill8.h). Kernels of a chunk of
// rows (row = query * R + group):
//   quantise  int8 codes of the queries
//   schedule  items (index_prefill.cuh)
//   scan      all block scores in int8, each row's best candidates
//   merge     joins the lists of tiles whose keys were cut
//
// scan: as index_select_sm90.cu, with products of m64n128k32: 256 rows x one block per step.
// Shared memory: 2 Q tiles x 32 KB, 8 key stages x 16 KB = 192 KB, 128-byte swizzle.
// 2 * 256 * 128 * 128 operations per 16 KB of keys.
#include "hopper/dependent_launch.cuh"
#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ops/index_select/index_codes8.cuh"
#include "ops/index_select/index_prefill8.cuh"

namespace m3 {
namespace {

using namespace hopper;
using namespace index_prefill8_detail;

constexpr int kStages = 8, kQueryBuffers = 2;
constexpr int kKeyBytes = kBlock * kDim, kQueryBytes = kTileRows * kDim;  // int8
constexpr int kSmemBytes = kQueryBuffers * kQueryBytes + kStages * kKeyBytes + 1024;
constexpr int kScanThreads = 384;
constexpr float kUp = 1.0f + 0x1p-16f;  // over the rounding of a sum of 128 squares in fp32

// --- quantise: a warp per row

__global__ void __launch_bounds__(256) quantise_kernel(const Params p, int num_rows) {
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (local >= num_rows) return;
  uint32_t codes = 0;
  float scale = 0, norm2 = 0, error2 = 0;
  if (int64_t{p.first_row} + local < p.batch.num_queries * p.groups) {
    const uint2 packed = static_cast<const uint2*>(
        p.qi_TRX)[(int64_t{p.first_row} + local) * (kDim / 4) + lane];
    const float x[4] = {unpack_bf16_low(packed.x), unpack_bf16_high(packed.x),
                        unpack_bf16_low(packed.y), unpack_bf16_high(packed.y)};
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, finite_abs(x[i]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    scale = __fdiv_rn(largest, 127.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int code = code_of(x[i], scale);
      codes |= (static_cast<uint32_t>(code) & 0xffu) << (8 * i);
      const float difference = fmaf(scale, static_cast<float>(code), -x[i]);
      norm2 += x[i] * x[i];
      error2 += difference * difference;
    }
  }
  reinterpret_cast<uint32_t*>(p.ws.codes)[local * (kDim / 4) + lane] = codes;
  if (p.uncertified == nullptr) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    norm2 += __shfl_xor_sync(kAll, norm2, step);
    error2 += __shfl_xor_sync(kAll, error2, step);
  }
  if (lane == 0) {
    const float norm = sqrtf(norm2) * kUp, error = sqrtf(error2) * kUp;
    p.ws.query_stat[local] = {scale, (norm + error) / scale, (error + 0x1p-13f * norm) / scale, 0};
  }
}

// --- scan

struct __align__(8) ScanBarriers {
  uint64_t query_full[kQueryBuffers], query_empty[kQueryBuffers];
  uint64_t key_full[kStages], key_empty[kStages];
};

// Issues one m64n128k128 product (four instructions) and commits it.
__device__ __forceinline__ void issue_scores(int32_t (&acc)[64], uint64_t query, uint64_t keys) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    wgmma_s8_ss(acc, descriptor_advance(query, k * 32), descriptor_advance(keys, k * 32),
                k == 0 ? 0 : 1);
  }
  wgmma_commit();
}

__device__ __forceinline__ void produce(const Params& p, const CUtensorMap& query_map,
                                        const CUtensorMap& key_map, char* smem_query,
                                        char* smem_keys, ScanBarriers& bars, ScanItem* slots,
                                        float4* stage_key, int lane) {
  const int num_items = p.ws.counters[0];
  int step = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    int index = 0;
    if (lane == 0) {
      index = atomicAdd(&p.ws.counters[1], 1);
      mbarrier_wait(&bars.query_empty[buffer], (round / kQueryBuffers & 1) ^ 1);
    }
    index = __shfl_sync(kAll, index, 0);
    ScanItem item = {-1, 0, 0, 0, -1};
    if (index < num_items) item = p.ws.items[index];
    if (lane == 0) slots[buffer] = item;
    if (item.seq < 0) {
      if (lane == 0) mbarrier_arrive(&bars.query_full[buffer]);
      return;
    }
    const MsaSequence seq = msa_sequence(p.batch, item.seq);
    if (lane == 0) {
      mbarrier_arrive_expect_tx(&bars.query_full[buffer], kQueryBytes);
      tma_load(smem_query + buffer * kQueryBytes, &query_map, &bars.query_full[buffer], 0,
               seq.q_begin * p.groups + item.tile * kTileRows - p.first_row);
    }
    const int32_t* pages = p.batch.page_table + item.seq * p.batch.max_pages;
    // Page numbers and scales are read 32 at a time; the copies are issued one by one.
    for (int top = item.last_block; top > item.first_block; top -= 32) {
      const int mine = top - 1 - lane;
      const int page = mine >= item.first_block ? pages[mine] : 0;
      float4 key = {p.keys.scale_P[page], 0, 0, 0};
      if (p.uncertified != nullptr) key.y = p.keys.error_P[page], key.z = p.keys.norm_P[page];
      const int count = min(32, top - item.first_block);
      for (int j = 0; j < count; ++j, ++step) {
        const int key_page = __shfl_sync(kAll, page, j);
        const float4 its = {__shfl_sync(kAll, key.x, j), __shfl_sync(kAll, key.y, j),
                            __shfl_sync(kAll, key.z, j), 0};
        if (lane == 0) {
          const int stage = step % kStages;
          mbarrier_wait(&bars.key_empty[stage], (step / kStages & 1) ^ 1);
          stage_key[stage] = its;
          mbarrier_arrive_expect_tx(&bars.key_full[stage], kKeyBytes);
          tma_load(smem_keys + stage * kKeyBytes, &key_map, &bars.key_full[stage], 0,
                   key_page * kBlock);
        }
        __syncwarp();
      }
    }
  }
}

template <int kCandidates>
__device__ __forceinline__ void consume(const Params& p, const char* smem_query,
                                        const char* smem_keys, ScanBarriers& bars,
                                        const ScanItem* slots, const float4* stage_key,
                                        int consumer, int warp, int lane) {
  using List = typename ListOf<kCandidates>::Type;
  constexpr bool kBounds = kCandidates == kExactCandidates;  // zero where they are not wanted
  const bool lower_row = lane & 1, second_tile = lane & 2;
  const int my_row =
      consumer * 128 + (second_tile ? 64 : 0) + warp % 4 * 16 + lane / 4 + (lower_row ? 8 : 0);
  const uint64_t key_descriptor = descriptor_k_major(smem_keys);
  int step = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    mbarrier_wait(&bars.query_full[buffer], round / kQueryBuffers & 1);
    const ScanItem item = slots[buffer];
    if (item.seq < 0) return;
    const MsaSequence seq = msa_sequence(p.batch, item.seq);
    const int flat_row = item.tile * kTileRows + my_row;
    const bool live = flat_row < seq.q_len * p.groups;
    const int position = seq.first_position + flat_row / p.groups;
    const int own = live && position >= 0 ? position / kBlock : -1;

    float query_error = 0, query_norm = 0;
    if (kBounds && live && p.uncertified != nullptr) {
      const float4 stat =
          p.ws.query_stat[seq.q_begin * p.groups + flat_row - p.first_row];
      query_error = stat.y, query_norm = stat.z;
    }
    List list;
    list.clear(p.id_bits);
    const uint64_t query_descriptor =
        descriptor_k_major(smem_query + buffer * kQueryBytes + consumer * 128 * kDim);
    int32_t acc0[64], acc1[64];
    for (int block = item.last_block - 1; block >= item.first_block; --block, ++step) {
      const int stage = step % kStages;
      const uint64_t keys = descriptor_advance(key_descriptor, stage * kKeyBytes);
      mbarrier_wait(&bars.key_full[stage], step / kStages & 1);
      issue_scores(acc0, query_descriptor, keys);
      issue_scores(acc1, descriptor_advance(query_descriptor, 64 * kDim), keys);
      // One lane reads: it is the one that gives the stage back.
      float4 key = {0, 0, 0, 0};
      if (lane == 0) key = stage_key[stage];
      key.x = __shfl_sync(kAll, key.x, 0);
      if constexpr (kBounds) {
        key.y = __shfl_sync(kAll, key.y, 0);
        key.z = __shfl_sync(kAll, key.z, 0);
      }
      int upper0, lower0, upper1, lower1;
      wgmma_wait<1>();
      wgmma_pin(acc0);
      row_maxima(acc0, upper0, lower0);
      wgmma_wait<0>();
      wgmma_pin(acc1);
      if (lane == 0) mbarrier_arrive(&bars.key_empty[stage]);
      row_maxima(acc1, upper1, lower1);
      // Quad reduction that leaves each lane one of the quad's four rows.
      const int give0 = __shfl_xor_sync(kAll, lower_row ? upper0 : lower0, 1);
      const int give1 = __shfl_xor_sync(kAll, lower_row ? upper1 : lower1, 1);
      const int row0 = max(lower_row ? lower0 : upper0, give0);
      const int row1 = max(lower_row ? lower1 : upper1, give1);
      const int other = __shfl_xor_sync(kAll, second_tile ? row0 : row1, 2);
      const int best = max(second_tile ? row1 : row0, other);
      float score = key.x * static_cast<float>(best) + 0.0f;
      if constexpr (kBounds) score = fmaf(query_error, key.y, fmaf(query_norm, key.z, score));
      if (block < own) list.add(score, block);
    }
    mbarrier_arrive(&bars.query_empty[buffer]);

    using Entry = typename List::Entry;
    Entry* to = nullptr;
    if (item.list >= 0) {
      to = static_cast<Entry*>(p.ws.lists) +
           (int64_t{item.list} * kTileRows + my_row) * kCandidates;
    } else if (live) {
      to = static_cast<Entry*>(p.ws.candidates) +
           int64_t{seq.q_begin * p.groups + flat_row - p.first_row} * kCandidates;
    }
    if (to != nullptr) {
#pragma unroll
      for (int j = 0; j < kCandidates; ++j) to[j] = list.entry(j);
    }
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_kernel(const __grid_constant__ CUtensorMap query_map,
                const __grid_constant__ CUtensorMap key_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const smem = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const smem_keys = smem + kQueryBuffers * kQueryBytes;
  __shared__ ScanBarriers bars;
  __shared__ ScanItem slots[kQueryBuffers];
  __shared__ float4 stage_key[kStages];
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(&bars.query_full[i], 1);
      mbarrier_init(&bars.query_empty[i], 256);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&bars.key_full[i], 1);
      mbarrier_init(&bars.key_empty[i], 8);  // one lane of each consumer warp
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  if (tid < 128) {
    registers_decrease<40>();
    if (tid < 32)
      produce(p, query_map, key_map, smem, smem_keys, bars, slots, stage_key, tid);
  } else {
    registers_increase<232>();
    consume<kCandidates>(p, smem, smem_keys, bars, slots, stage_key, tid / 128 - 1, tid / 32,
                         tid % 32);
  }
}

// --- merge: one warp per row of a split tile, a lane per list

constexpr int kMergeWarps = 4;

template <typename Entry>
__device__ __forceinline__ Entry warp_best(Entry x) {
  if constexpr (sizeof(Entry) == 4) {
    return __reduce_max_sync(kAll, x);
  } else {
    const uint32_t high = __reduce_max_sync(kAll, static_cast<uint32_t>(x >> 32));
    const uint32_t low =
        static_cast<uint32_t>(x >> 32) == high ? static_cast<uint32_t>(x) : 0u;
    return Entry{high} << 32 | __reduce_max_sync(kAll, low);
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(32 * kMergeWarps) merge_kernel(const Params p) {
  using Entry = typename ListOf<kCandidates>::Type::Entry;
  constexpr int kStride = kCandidates + 1 - kCandidates % 2;  // odd: heads lie in different banks
  __shared__ Entry heads[kMergeWarps][32 * kStride];
  const int lane = threadIdx.x % 32;
  Entry* mine = heads[threadIdx.x / 32] + lane * kStride;
  grid_dependency_wait();
  const int num_rows = p.ws.counters[3] * kTileRows;
  for (int work = (blockIdx.x * 32 * kMergeWarps + threadIdx.x) / 32; work < num_rows;
       work += gridDim.x * kMergeWarps) {
    const MergeItem item = p.ws.merges[work / kTileRows];
    const int row = work % kTileRows, flat_row = item.tile * kTileRows + row;
    const MsaSequence seq = msa_sequence(p.batch, item.seq);
    if (flat_row >= seq.q_len * p.groups) continue;
    const Entry* lists = static_cast<const Entry*>(p.ws.lists);
    Entry list[kCandidates];
#pragma unroll
    for (int j = 0; j < kCandidates; ++j) list[j] = 0;
    for (int l = lane; l < item.num_lists; l += 32) {
      const Entry* from = lists + (int64_t{item.list + l} * kTileRows + row) * kCandidates;
      Entry other[kCandidates];
#pragma unroll
      for (int j = 0; j < kCandidates; ++j) other[j] = from[j];
      if (l == lane) {
#pragma unroll
        for (int j = 0; j < kCandidates; ++j) list[j] = other[j];
      } else {  // both descend: the best of the two are the larger of list[j] and other[C - 1 - j]
#pragma unroll
        for (int j = 0; j < kCandidates; ++j) list[j] = max(list[j], other[kCandidates - 1 - j]);
#pragma unroll 1
        for (int sweep = 0; sweep < kCandidates; sweep += 2) {  // odd-even transposition
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
            for (int j = odd; j + 1 < kCandidates; j += 2) {
              const Entry low = min(list[j], list[j + 1]);
              list[j] = max(list[j], list[j + 1]);
              list[j + 1] = low;
            }
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kCandidates; ++j) mine[j] = list[j];
    __syncwarp();
    Entry* to = static_cast<Entry*>(p.ws.candidates) +
                int64_t{seq.q_begin * p.groups + flat_row - p.first_row} * kCandidates;
    int at = 0;
    Entry head = mine[0];
    for (int j = 0; j < kCandidates; ++j) {
      const Entry best = warp_best(head);
      if (head == best && best != 0) head = ++at < kCandidates ? mine[at] : 0;
      if (lane == 0) to[j] = best;
    }
    __syncwarp();
  }
}

}  // namespace

namespace index_prefill8_detail {

template <int kCandidates>
void find_candidates(const IndexPrefill8Params& args, const Params& p, int buffer_rows, int sms,
                     cudaStream_t stream) {
  const CUtensorMap query_map =
      tensor_map_create(p.ws.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                        {{kDim, 0, kDim}, {buffer_rows, kDim, kTileRows}}, MapSwizzle::k128Bytes);
  const CUtensorMap key_map = tensor_map_create(
      p.keys.codes_PBX, CU_TENSOR_MAP_DATA_TYPE_UINT8,
      {{kDim, 0, kDim}, {args.num_pages * kBlock, kDim, kBlock}}, MapSwizzle::k128Bytes);
  const auto scan = scan_kernel<kCandidates>;
  M3_CUDA_CHECK(
      cudaFuncSetAttribute(scan, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  const unsigned row_ctas = static_cast<unsigned>((buffer_rows + 7) / 8);  // a warp per row
  quantise_kernel<<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
  schedule_kernel<<<1, 1024, 0, stream>>>(p.batch, p.groups, kTopk, sms, p.first_row, p.end_row,
                                          nullptr, p.ws);
  launch_dependent(scan, sms, kScanThreads, kSmemBytes, stream, query_map, key_map, p);
  launch_dependent(merge_kernel<kCandidates>, sms * 4, 32 * kMergeWarps, 0, stream, p);
}

template void find_candidates<15>(const IndexPrefill8Params&, const Params&, int, int,
                                  cudaStream_t);
template void find_candidates<24>(const IndexPrefill8Params&, const Params&, int, int,
                                  cudaStream_t);
template void find_candidates<32>(const IndexPrefill8Params&, const Params&, int, int,
                                  cudaStream_t);
template void find_candidates<64>(const IndexPrefill8Params&, const Params&, int, int,
                                  cudaStream_t);

}  // namespace index_prefill8_detail
}  // namespace m3
