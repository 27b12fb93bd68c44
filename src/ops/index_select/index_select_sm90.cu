// index_select for prefill on Hopper: block scores and exact top-k in one pass over the index keys,
// no score ever in memory (hopper.md §6.1). bf16, X = B = 128, one forced local block.
//
// Three kernels: `schedule` (1 CTA) cuts the call into items from the device lengths; `scan`
// (persistent) scores and ranks; `merge` joins the lists of row tiles whose keys were cut into
// several items.
//
// scan: an item is 256 rows (row = query * R + group, of one sequence) against blocks [first,
// last), newest block first, so that equal scores keep the lower id.
//   warpgroup 0: producer (1 warp): Q tiles and key blocks by tensor copies.
//   warpgroups 1, 2: 128 rows each as two m64n128 products. While one warpgroup reduces, the
//   other's products keep the tensor cores busy. Each of the 256 threads ends up with one row, its
//   list in registers.
// Shared memory: 2 Q tiles x 64 KB, 3 key stages x 32 KB = 224 KB, 128-byte swizzle, halves of 64
// channels. Work: 2 * 256 * 128 * 128 FLOP per 32 KB of keys (L2). Max of 32768 scores: 512 of
// about 2100 clocks.
#include <algorithm>
#include <climits>

#include "hopper/dependent_launch.cuh"
#include "hopper/fence.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ops/index_select/index_prefill.cuh"
#include "ops/index_select/index_select_cuda.h"

namespace m3 {
namespace {

using namespace hopper;

using namespace index_prefill;

constexpr int kStages = 3, kQueryBuffers = 2;
constexpr int kHalfKeyBytes = kBlock * 128, kKeyBytes = 2 * kHalfKeyBytes;
constexpr int kHalfQueryBytes = kTileRows * 128, kQueryBytes = 2 * kHalfQueryBytes;
constexpr int kSmemBytes =
    kQueryBuffers * kQueryBytes + kStages * kKeyBytes + 1024;  // 1024: alignment
constexpr int kScanThreads = 384;

// Made by `schedule` and `scan`.
struct Workspace : Schedule {
  int2* lists;  // [lists][256][K]: (score bits, id), best first; the last one is unused
  char* end;
};

struct __align__(8) ScanBarriers {
  uint64_t query_full[kQueryBuffers], query_empty[kQueryBuffers];
  uint64_t key_full[kStages], key_empty[kStages];
};

__device__ __forceinline__ void load_query(char* smem, const CUtensorMap* map, uint64_t* bar,
                                           int row) {
  mbarrier_arrive_expect_tx(bar, kQueryBytes);
  tma_load(smem, map, bar, 0, row);
  tma_load(smem + kHalfQueryBytes, map, bar, 64, row);
}

__device__ __forceinline__ void load_keys(char* smem, const CUtensorMap* map, uint64_t* bar,
                                          int row) {
  mbarrier_arrive_expect_tx(bar, kKeyBytes);
  tma_load(smem, map, bar, 0, row);
  tma_load(smem + kHalfKeyBytes, map, bar, 64, row);
}

// Issues one m64n128k128 product (eight instructions) and commits it.
__device__ __forceinline__ void issue_scores(float (&acc)[64], uint64_t query, uint64_t keys) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t in_half = k % 4 * 32;
    wgmma_bf16_ss(acc, descriptor_advance(query, k / 4 * kHalfQueryBytes + in_half),
                  descriptor_advance(keys, k / 4 * kHalfKeyBytes + in_half), k == 0 ? 0 : 1);
  }
  wgmma_commit();
}

template <int kTopk>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_kernel(const __grid_constant__ CUtensorMap query_map,
                const __grid_constant__ CUtensorMap key_map, const MsaBatch batch, const int groups,
                int32_t* ids_RTK, const Workspace ws) {
  extern __shared__ char smem_raw[];
  char* const smem = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const smem_query = smem;
  char* const smem_keys = smem + kQueryBuffers * kQueryBytes;
  __shared__ ScanBarriers bars;
  __shared__ ScanItem slots[kQueryBuffers];

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, warpgroup = tid / 128;
  if (tid == 0) {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(&bars.query_full[i], 1);
      mbarrier_init(&bars.query_empty[i], 256);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&bars.key_full[i], 1);
      mbarrier_init(&bars.key_empty[i], 2);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  const int num_items = ws.counters[0];

  if (warpgroup == 0) {
    registers_decrease<40>();
    if (warp == 0) {
      int step = 0;
      for (int round = 0;; ++round) {
        const int buffer = round % kQueryBuffers;
        int index = 0;
        if (lane == 0) {
          index = atomicAdd(&ws.counters[1], 1);
          mbarrier_wait(&bars.query_empty[buffer], (round / kQueryBuffers & 1) ^ 1);
        }
        index = __shfl_sync(0xffffffffu, index, 0);
        ScanItem item = {-1, 0, 0, 0, -1};
        if (index < num_items) item = ws.items[index];
        if (lane == 0) slots[buffer] = item;
        if (item.seq < 0) {
          if (lane == 0) mbarrier_arrive(&bars.query_full[buffer]);
          break;
        }
        const MsaSequence seq = msa_sequence(batch, item.seq);
        if (lane == 0) {
          load_query(smem_query + buffer * kQueryBytes, &query_map, &bars.query_full[buffer],
                     seq.q_begin * groups + item.tile * kTileRows);
        }
        // Page numbers are read 32 at a time; the copies are issued one by one.
        for (int top = item.last_block; top > item.first_block; top -= 32) {
          const int mine = top - 1 - lane;
          const int row = mine >= item.first_block
                              ? static_cast<int>(msa_block_row(batch, seq, mine, kBlock))
                              : 0;
          const int count = min(32, top - item.first_block);
          for (int j = 0; j < count; ++j, ++step) {
            const int key_row = __shfl_sync(0xffffffffu, row, j);
            if (lane == 0) {
              const int stage = step % kStages;
              mbarrier_wait(&bars.key_empty[stage], (step / kStages & 1) ^ 1);
              load_keys(smem_keys + stage * kKeyBytes, &key_map, &bars.key_full[stage], key_row);
            }
            __syncwarp();
          }
        }
      }
    }
  } else {
    registers_increase<232>();
    const int consumer = warpgroup - 1;
    const bool lower_row = lane & 1, second_tile = lane & 2;
    const int my_row =
        consumer * 128 + (second_tile ? 64 : 0) + warp % 4 * 16 + lane / 4 + (lower_row ? 8 : 0);
    const uint64_t key_descriptor = descriptor_k_major(smem_keys);
    int step = 0;
    for (int round = 0;; ++round) {
      const int buffer = round % kQueryBuffers;
      mbarrier_wait(&bars.query_full[buffer], round / kQueryBuffers & 1);
      const ScanItem item = slots[buffer];
      if (item.seq < 0) break;
      const MsaSequence seq = msa_sequence(batch, item.seq);
      const int flat_row = item.tile * kTileRows + my_row;
      const bool live = flat_row < seq.q_len * groups;
      const int position = seq.first_position + flat_row / groups;
      const int own = live && position >= 0 ? position / kBlock : -1;

      TopkList<kTopk - 1> list;
      list.clear();
      const uint64_t query_descriptor =
          descriptor_k_major(smem_query + buffer * kQueryBytes + consumer * 128 * 128);
      float acc0[64], acc1[64];
      for (int block = item.last_block - 1; block >= item.first_block; --block, ++step) {
        const int stage = step % kStages;
        const uint64_t keys = descriptor_advance(key_descriptor, stage * kKeyBytes);
        mbarrier_wait(&bars.key_full[stage], step / kStages & 1);
        issue_scores(acc0, query_descriptor, keys);
        issue_scores(acc1, descriptor_advance(query_descriptor, 64 * 128), keys);
        float upper0, lower0, upper1, lower1;
        wgmma_wait<1>();
        wgmma_pin(acc0);
        row_maxima(acc0, upper0, lower0);
        wgmma_wait<0>();
        wgmma_pin(acc1);
        if (tid % 128 == 0) mbarrier_arrive(&bars.key_empty[stage]);
        row_maxima(acc1, upper1, lower1);
        // Quad reduction that leaves each lane one of the quad's four rows.
        const float give0 = __shfl_xor_sync(0xffffffffu, lower_row ? upper0 : lower0, 1);
        const float give1 = __shfl_xor_sync(0xffffffffu, lower_row ? upper1 : lower1, 1);
        const float row0 = fmaxf(lower_row ? lower0 : upper0, give0);
        const float row1 = fmaxf(lower_row ? lower1 : upper1, give1);
        const float other = __shfl_xor_sync(0xffffffffu, second_tile ? row0 : row1, 2);
        const float score = msa_canonical_score(fmaxf(second_tile ? row1 : row0, other));
        if (score >= list.threshold() && block < own) list.insert_lower_id(score, block);
      }
      mbarrier_arrive(&bars.query_empty[buffer]);

      if (item.list >= 0) {
        int4* to =
            reinterpret_cast<int4*>(ws.lists + (int64_t{item.list} * kTileRows + my_row) * kTopk);
#pragma unroll
        for (int j = 0; j < kTopk; j += 2) {
          const int last = j + 1 < kTopk - 1 ? j + 1 : j;
          to[j / 2] = make_int4(__float_as_int(list.score[j]), list.id[j],
                                __float_as_int(list.score[last]), list.id[last]);
        }
      } else if (live) {
        const int64_t query = seq.q_begin + flat_row / groups;
        write_row<kTopk>(list.id, own,
                         ids_RTK + (flat_row % groups * batch.num_queries + query) * kTopk);
      }
    }
  }
}

// One warp per row of a split tile: a lane per list (joined first where there are more), heads in
// shared memory, K - 1 rounds of "best head, then lower id".
constexpr int kMergeThreads = 256;

template <int kTopk>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const MsaBatch batch, const int groups, int32_t* ids_RTK, const Workspace ws) {
  constexpr int kStride =
      kTopk + 1;  // int2 words; odd, so that heads of equal rank lie in different banks
  __shared__ int2 heads[kMergeThreads / 32][32 * kStride];
  const int lane = threadIdx.x % 32;
  int2* mine = heads[threadIdx.x / 32] + lane * kStride;
  grid_dependency_wait();
  const int num_rows = ws.counters[3] * kTileRows, num_warps = gridDim.x * (kMergeThreads / 32);
  for (int work = (blockIdx.x * kMergeThreads + threadIdx.x) / 32; work < num_rows;
       work += num_warps) {
    const MergeItem item = ws.merges[work / kTileRows];
    const int row = work % kTileRows, flat_row = item.tile * kTileRows + row;
    const MsaSequence seq = msa_sequence(batch, item.seq);
    if (flat_row >= seq.q_len * groups) continue;
    const int position = seq.first_position + flat_row / groups;
    const int own = position >= 0 ? position / kBlock : -1;

    TopkList<kTopk - 1> list;
    list.clear();
    for (int l = lane; l < item.num_lists; l += 32) {
      const int4* from = reinterpret_cast<const int4*>(
          ws.lists + (int64_t{item.list + l} * kTileRows + row) * kTopk);
      int4 pairs[kTopk / 2];
#pragma unroll
      for (int j = 0; j < kTopk / 2; ++j) pairs[j] = from[j];
#pragma unroll
      for (int j = 0; j < kTopk - 1; ++j) {
        const float score = __int_as_float(j % 2 == 0 ? pairs[j / 2].x : pairs[j / 2].z);
        const int32_t id = j % 2 == 0 ? pairs[j / 2].y : pairs[j / 2].w;
        if (l == lane) {
          list.score[j] = score;
          list.id[j] = id;
        } else if (id >= 0) {
          list.insert(score, id);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTopk - 1; ++j)
      mine[j] = make_int2(__float_as_int(list.score[j]), list.id[j]);
    mine[kTopk - 1] = make_int2(0, -1);  // behind the end

    int32_t chosen[kTopk - 1];
    int at = 0;
    int2 head = mine[0];
#pragma unroll
    for (int s = 0; s < kTopk - 1; ++s) {
      const uint32_t bits = static_cast<uint32_t>(head.x);
      const uint32_t key = head.y < 0 ? 0u : (bits & 0x80000000u ? ~bits : bits | 0x80000000u);
      const uint32_t best = __reduce_max_sync(0xffffffffu, key);
      const bool candidate = head.y >= 0 && key == best;
      const uint32_t id =
          __reduce_min_sync(0xffffffffu, candidate ? static_cast<uint32_t>(head.y) : 0x7fffffffu);
      chosen[s] = static_cast<int32_t>(id);
      if (candidate && head.y == static_cast<int32_t>(id)) head = mine[++at];
    }
    if (lane == 0) {
      const int64_t query = seq.q_begin + flat_row / groups;
      write_row<kTopk>(chosen, own,
                       ids_RTK + (flat_row % groups * batch.num_queries + query) * kTopk);
    }
    __syncwarp();
  }
}

Workspace make_workspace(const MsaGeometry& g, const MsaBatch& batch, void* begin) {
  const int64_t items = Schedule::max_items(batch.num_queries * g.groups, batch.num_seqs, kMaxSms),
                lists = Schedule::max_lists(kMaxSms);
  Workspace ws;
  char* at = static_cast<char*>(begin);
  workspace_take(at, ws.counters, 64);
  workspace_take(at, ws.items, items);
  workspace_take(at, ws.merges, lists);
  workspace_take(at, ws.lists, lists * g.topk * kTileRows);
  ws.end = at;
  return ws;
}

template <int kTopk>
void launch(const IndexSelectCudaArgs& a, cudaStream_t stream) {
  const int R = a.geometry.groups, sms = std::min(sm_count(), kMaxSms);
  const int64_t rows = a.batch.num_queries * R;
  const int64_t key_rows = a.batch.layout == KvLayout::kPaged ? a.num_pages * kBlock : a.num_pages;
  const CUtensorMap query_map =
      tensor_map_create(a.qi_TRX, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        {{kDim, 0, 64}, {rows, kDim * 2, kTileRows}}, MapSwizzle::k128Bytes);
  const CUtensorMap key_map =
      tensor_map_create(a.ki, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        {{kDim, 0, 64}, {key_rows, kDim * 2, kBlock}}, MapSwizzle::k128Bytes);
  const Workspace ws = make_workspace(a.geometry, a.batch, a.workspace);
  const auto scan = scan_kernel<kTopk>;
  M3_CUDA_CHECK(
      cudaFuncSetAttribute(scan, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  schedule_kernel<<<1, 1024, 0, stream>>>(a.batch, R, kTopk, sms, 0, INT_MAX, a.tile_flags, ws);
  launch_dependent(scan, sms, kScanThreads, kSmemBytes, stream, query_map, key_map, a.batch, R,
                   a.ids_RTK, ws);
  launch_dependent(merge_kernel<kTopk>, sms * 4, kMergeThreads, 0, stream, a.batch, R, a.ids_RTK,
                   ws);
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

int64_t index_select_sm90_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch) {
  return make_workspace(geometry, batch, nullptr).end - static_cast<char*>(nullptr);
}

void index_select_sm90(const IndexSelectCudaArgs& args, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  switch (args.geometry.topk) {
    case 4:
      return launch<4>(args, handle);
    case 16:
      return launch<16>(args, handle);
    default:
      M3_FAIL("index_select: the Hopper path has topk 4 and 16, got {}", args.geometry.topk);
  }
}

}  // namespace m3
