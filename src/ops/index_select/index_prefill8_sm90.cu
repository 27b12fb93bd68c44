// Prefill selection with int8 index keys (index_prefill8.h). Per chunk of rows, after the candidates
// (index_prefill8_scan_sm90.cu):
//   count, place, scatter    (rescore) pairs of row and candidate, sorted by page
//   rescore   block-outer: a page of bf16 keys against the rows that have it as candidate
//   choose    the row's ids, and (exact) whether they are certified
// exact: tiles with a row that is not are scanned again in bf16, by the kernels of index_select_sm90.
//
// rescore: 4 CTAs an SM, 32 KB of keys each; queries go from global memory straight to the
// registers of the product's A operand. 2 * 128 * 128 FLOP and 256 bytes of a query per pair.
#include <algorithm>
#include <climits>

#include "hopper/fence.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ops/index_select/index_prefill8.cuh"
#include "ops/index_select/index_select_cuda.h"

namespace m3 {
namespace {

using namespace hopper;
using namespace index_prefill8_detail;

constexpr int kChunkQueries = 33792;  // at 4 groups 4 tiles for each of 132 SMs: whole waves
constexpr int kItemPairs = 256;
constexpr int kMaxIdBits = 17;
constexpr int kCountStride = 8;  // a counter a sector: neighbouring pages are counted together

// --- what a row of the chunk is

struct Row {
  int32_t query, group;
  int32_t own;  // -1: an empty row
  bool mine;    // of the call, and of a tile that begins in this chunk
  bool choice;  // has more blocks than it may take
  MsaSequence seq;
};

__device__ __forceinline__ Row row_of(const Params& p, int local) {
  Row row;
  const int at = p.first_row + local;
  row.query = at / p.groups;
  row.group = at % p.groups;
  row.mine = row.query < p.batch.num_queries;
  row.own = -1;
  row.choice = false;
  if (!row.mine) return row;
  row.seq = msa_sequence(p.batch, msa_find(p.batch.cu_q, p.batch.num_seqs, row.query));
  const int row0 = row.seq.q_begin * p.groups, tile0 = row0 + (at - row0) / kTileRows * kTileRows;
  row.mine = tile0 >= p.first_row && tile0 < p.end_row;
  const int position = row.seq.first_position + row.query - row.seq.q_begin;
  if (position >= 0) row.own = position / kBlock;
  row.choice = row.mine && row.own + 1 > kTopk;
  return row;
}

// --- pairs by page: a warp per row

// visit(pair, page) for the candidates of a row.
template <int kCandidates, typename Visit>
__device__ __forceinline__ void each_candidate(const Params& p, int local, int lane,
                                               const Visit& visit) {
  using List = typename ListOf<kCandidates>::Type;
  const Row row = row_of(p, local);
  if (!row.choice) return;
  const int32_t* pages = p.batch.page_table + row.seq.index * p.batch.max_pages;
  for (int slot = lane; slot < kCandidates; slot += 32) {
    const int64_t pair = int64_t{local} * kCandidates + slot;
    const auto entry = static_cast<const typename List::Entry*>(p.ws.candidates)[pair];
    if (entry != 0) visit(pair, pages[List::id(entry, p.id_bits)]);
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(256) count_kernel(const Params p, int num_rows) {
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32;
  if (local >= num_rows) return;
  each_candidate<kCandidates>(p, local, threadIdx.x % 32, [&](int64_t pair, int page) {
    p.ws.place[pair] = atomicAdd(&p.ws.count[page * kCountStride], 1);
  });
}

__global__ void __launch_bounds__(1024) place_kernel(const Params p) {
  __shared__ int scratch[32];
  __shared__ int ends[2];
  const int tid = threadIdx.x;
  int pairs = 0, items = 0;
  for (int base = 0; base < p.num_pages; base += 1024) {
    const int page = base + tid;
    const int count = page < p.num_pages ? p.ws.count[page * kCountStride] : 0;
    const int cuts = (count + kItemPairs - 1) / kItemPairs;
    const int pairs_end = cta_scan_1024(count, scratch), items_end = cta_scan_1024(cuts, scratch);
    const int first = pairs + pairs_end - count;
    if (page < p.num_pages) p.ws.page_begin[page] = first;
    for (int i = 0; i < cuts; ++i) {
      p.ws.rescore_items[items + items_end - cuts + i] = {page, first + i * kItemPairs,
                                                  min(kItemPairs, count - i * kItemPairs)};
    }
    if (tid == 1023) ends[0] = pairs_end, ends[1] = items_end;
    __syncthreads();
    pairs += ends[0];
    items += ends[1];
    __syncthreads();
  }
  if (tid == 0) *p.ws.num_rescore_items = items;
}

template <int kCandidates>
__global__ void __launch_bounds__(256) scatter_kernel(const Params p, int num_rows) {
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32;
  if (local >= num_rows) return;
  each_candidate<kCandidates>(p, local, threadIdx.x % 32, [&](int64_t pair, int page) {
    p.ws.pairs[p.ws.page_begin[page] + p.ws.place[pair]] = static_cast<int32_t>(pair);
  });
}

// --- rescore

constexpr int kRescoreThreads = 128, kRescoreCtas = 4;
constexpr int kHalfPageBytes = kBlock * 128, kPageBytes = 2 * kHalfPageBytes;
constexpr int kRescoreSmemBytes = kPageBytes + 1024;

template <int kCandidates>
__global__ void __launch_bounds__(kRescoreThreads, kRescoreCtas)
    rescore_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const keys = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  __shared__ uint64_t full;
  __shared__ int32_t item_pairs[kItemPairs];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  if (tid == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const uint64_t key_descriptor = descriptor_k_major(keys);
  const uint32_t* queries =
      static_cast<const uint32_t*>(p.qi_TRX) + int64_t{p.first_row} * (kDim / 2) + lane % 4;
  const int num_items = *p.ws.num_rescore_items;
  int phase = 0;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x, phase ^= 1) {
    const RescoreItem item = p.ws.rescore_items[index];
    __syncthreads();  // the last item's keys have been read
    if (tid == 0) {
      mbarrier_arrive_expect_tx(&full, kPageBytes);
      tma_load(keys, &x_map, &full, 0, item.page * kBlock);
      tma_load(keys + kHalfPageBytes, &x_map, &full, 64, item.page * kBlock);
    }
    for (int i = tid; i < kItemPairs; i += kRescoreThreads)
      item_pairs[i] = i < item.count ? p.ws.pairs[item.begin + i] : -1;
    __syncthreads();
    for (int base = 0; base < item.count; base += 64) {
      uint32_t a[kDim / 16][4];
      int pair[2];
      const uint32_t* query[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair[half] = item_pairs[base + 16 * warp + lane / 4 + 8 * half];
        query[half] = queries + int64_t{max(pair[half], 0) / kCandidates} * (kDim / 2);
      }
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = __ldg(query[i % 2] + 8 * k + i / 2 * 4);
      }
      if (base == 0) mbarrier_wait(&full, phase);
      float acc[64];
      wgmma_pin(a);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        wgmma_bf16_rs<0>(acc, a[k],
                         descriptor_advance(key_descriptor, k / 4 * kHalfPageBytes + k % 4 * 32),
                         k == 0 ? 0 : 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(acc);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = fmaxf(acc[2 * half], acc[2 * half + 1]);
#pragma unroll
        for (int j = 4; j < 64; j += 4)
          best = fmaxf(best, fmaxf(acc[j + 2 * half], acc[j + 2 * half + 1]));
        best = fmaxf(best, __shfl_xor_sync(kAll, best, 1));
        best = fmaxf(best, __shfl_xor_sync(kAll, best, 2));
        if (lane % 4 == 0 && pair[half] >= 0) p.ws.score[pair[half]] = msa_canonical_score(best);
      }
    }
  }
}

// --- choose: a warp per row

// No block that is no candidate can have a bf16 score of `last` or more. See index_prefill8.h.
template <int kCandidates>
__device__ __forceinline__ bool is_certified(const Params& p, int local, float last) {
  using List = typename ListOf<kCandidates>::Type;
  const auto worst = static_cast<const typename List::Entry*>(
      p.ws.candidates)[int64_t{local} * kCandidates + kCandidates - 1];
  if (worst == 0) return true;  // every block was a candidate
  return p.ws.query_stat[local].x * List::largest_score(worst, p.id_bits) < last;
}

template <int kCandidates>
__global__ void __launch_bounds__(256) choose_kernel(const Params p, int num_rows) {
  using List = typename ListOf<kCandidates>::Type;
  constexpr bool kRescored = kCandidates >= kTopk;
  constexpr int kPerLane = (kCandidates + 31) / 32;
  const int local = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (local >= num_rows) return;
  const Row row = row_of(p, local);
  if (!row.mine) return;
  int32_t* ids = p.ids_RTK + (row.group * p.batch.num_queries + row.query) * kTopk;
  if (!row.choice) {
    if (lane < kTopk) ids[lane] = lane <= row.own ? lane : -1;
    return;
  }
  int id[kPerLane], rank[kPerLane], place[kPerLane];
  uint64_t key[kPerLane];  // higher score, then lower id
  float score[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int slot = 32 * i + lane;
    const int64_t at = int64_t{local} * kCandidates + slot;
    typename List::Entry entry = 0;
    if (slot < kCandidates)
      entry = static_cast<const typename List::Entry*>(p.ws.candidates)[at];
    id[i] = entry == 0 ? INT_MAX : List::id(entry, p.id_bits);
    score[i] = kRescored && entry != 0 ? p.ws.score[at] : 0.0f;
    key[i] = entry == 0
                 ? 0
                 : uint64_t{ordered_bits(score[i])} << 32 | (0xffffffffu - static_cast<uint32_t>(id[i]));
    rank[i] = kRescored || entry == 0 ? 0 : slot;
    place[i] = 0;
  }
  if constexpr (kRescored) {
#pragma unroll
    for (int from = 0; from < kCandidates; ++from) {
      const uint64_t other = __shfl_sync(kAll, key[from / 32], from % 32);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) rank[i] += other > key[i] ? 1 : 0;
    }
  }
  bool chosen[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) chosen[i] = key[i] != 0 && rank[i] < kTopk - 1;
#pragma unroll
  for (int from = 0; from < kCandidates; ++from) {
    const int other = __shfl_sync(kAll, chosen[from / 32] ? id[from / 32] : INT_MAX, from % 32);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) place[i] += other < id[i] ? 1 : 0;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (chosen[i]) ids[place[i]] = id[i];
    if constexpr (kRescored) {
      if (p.uncertified != nullptr && chosen[i] && rank[i] == kTopk - 2 &&
          !is_certified<kCandidates>(p, local, score[i])) {
        const int row0 = row.seq.q_begin * p.groups, at = p.first_row + local;
        const int tile0 = row0 + (at - row0) / kTileRows * kTileRows;
        p.ws.tile_flags[tile_number(tile0, row.seq.index)] = 1;
        atomicAdd(p.uncertified, 1);
      }
    }
  }
  if (lane == 0) ids[kTopk - 1] = row.own;
}

// --- host

int id_bits(const MsaBatch& batch) {
  int bits = 13;
  while (batch.max_k_len > int64_t{kBlock} << bits) ++bits;
  return bits;
}

int64_t chunk_rows(const MsaGeometry& g, const MsaBatch& batch) {
  return std::min<int64_t>(batch.num_queries, kChunkQueries) * g.groups;
}

// Upper bound of tile_number.
int64_t num_tiles(const MsaGeometry& g, const MsaBatch& batch) {
  return batch.num_queries * g.groups / kTileRows + batch.num_seqs + 1;
}

Workspace make_workspace(const MsaGeometry& g, const MsaBatch& batch, int64_t num_pages,
                         int candidates, void* base) {
  char* at = static_cast<char*>(base);
  const auto take = [&](auto*& pointer, int64_t bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += align_up(bytes);
  };
  const int64_t rows = chunk_rows(g, batch) + kTileRows,
                entry_bytes = candidates < kTopk ? 8 : 4;
  const int64_t max_lists = Schedule::max_lists(kMaxSms), pairs = rows * candidates;
  Workspace ws;
  take(ws.counters, 64);
  take(ws.items, Schedule::max_items(rows, batch.num_seqs, kMaxSms) * sizeof(ScanItem));
  take(ws.merges, max_lists * sizeof(MergeItem));
  take(ws.lists, max_lists * kTileRows * candidates * entry_bytes);
  take(ws.codes, rows * kDim);
  take(ws.candidates, pairs * entry_bytes);
  ws.end = at;
  if (candidates < kTopk) return ws;
  take(ws.place, pairs * 4);
  take(ws.pairs, pairs * 4);
  take(ws.score, pairs * 4);
  take(ws.count, num_pages * kCountStride * 4);
  take(ws.page_begin, num_pages * 4);
  take(ws.rescore_items,
       (pairs / kItemPairs + std::min(pairs, num_pages) + 1) * sizeof(RescoreItem));
  take(ws.num_rescore_items, 4);
  ws.end = at;
  if (candidates < kExactCandidates) return ws;
  take(ws.query_stat, rows * sizeof(float4));
  take(ws.tile_flags, num_tiles(g, batch) * 4);
  take(ws.bf16, index_select_sm90_workspace_bytes(g, batch));
  ws.end = at;
  return ws;
}

template <int kCandidates>
void run(const IndexPrefill8Params& a, cudaStream_t stream) {
  const int R = a.geometry.groups, sms = std::min(sm_count(), kMaxSms);
  const int64_t total = a.batch.num_queries * R, rows = chunk_rows(a.geometry, a.batch);
  const int buffer_rows = static_cast<int>(rows) + kTileRows;
  Params p;
  p.batch = a.batch;
  p.groups = R;
  p.num_pages = static_cast<int>(a.num_pages);
  p.id_bits = id_bits(a.batch);
  p.qi_TRX = a.qi_TRX;
  p.keys = a.keys;
  p.ids_RTK = a.ids_RTK;
  p.uncertified = a.uncertified;
  p.ws = make_workspace(a.geometry, a.batch, a.num_pages, kCandidates, a.workspace);
  if (a.uncertified != nullptr) {
    M3_CUDA_CHECK(cudaMemsetAsync(a.uncertified, 0, 4, stream));
    M3_CUDA_CHECK(
        cudaMemsetAsync(p.ws.tile_flags, 0, num_tiles(a.geometry, a.batch) * 4, stream));
  }
  const unsigned row_ctas = static_cast<unsigned>((buffer_rows + 7) / 8);  // a warp per row
  for (int64_t first = 0; first < total; first += rows) {
    p.first_row = static_cast<int>(first);
    p.end_row = static_cast<int>(std::min(first + rows, total));
    find_candidates<kCandidates>(a, p, buffer_rows, sms, stream);
    if constexpr (kCandidates >= kTopk) {
      const CUtensorMap x_map = tensor_map_create(
          a.x_PBX, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
          {{kDim, 0, 64}, {a.num_pages * kBlock, kDim * 2, kBlock}}, MapSwizzle::k128Bytes);
      const auto rescore = rescore_kernel<kCandidates>;
      M3_CUDA_CHECK(cudaFuncSetAttribute(rescore, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kRescoreSmemBytes));
      M3_CUDA_CHECK(
          cudaMemsetAsync(p.ws.count, 0, a.num_pages * kCountStride * 4, stream));
      count_kernel<kCandidates><<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
      place_kernel<<<1, 1024, 0, stream>>>(p);
      scatter_kernel<kCandidates><<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
      rescore<<<sms * kRescoreCtas, kRescoreThreads, kRescoreSmemBytes, stream>>>(x_map, p);
    }
    choose_kernel<kCandidates><<<row_ctas, 256, 0, stream>>>(p, buffer_rows);
  }
  M3_CUDA_CHECK(cudaGetLastError());
  if (a.uncertified == nullptr) return;
  index_select_sm90({.geometry = a.geometry,
                     .batch = a.batch,
                     .qi_TRX = a.qi_TRX,
                     .ki = a.x_PBX,
                     .num_pages = a.num_pages,
                     .ids_RTK = a.ids_RTK,
                     .tile_flags = p.ws.tile_flags,
                     .workspace = p.ws.bf16},
                    Stream{stream});
}

}  // namespace

std::string index_prefill8_supports(const MsaGeometry& g, const MsaBatch& batch, int candidates) {
  if (g.index_dim != kDim || g.block != kBlock || g.topk != kTopk || g.local != 1 || g.init != 0)
    return "want index dim 128, blocks of 128, topk 16, one local block and no initial one";
  if (batch.layout != KvLayout::kPaged) return "want paged keys";
  if (candidates != 15 && candidates != 24 && candidates != 32 && candidates != kExactCandidates)
    return "want 15, 24, 32 or 64 candidates, got " + std::to_string(candidates);
  if (batch.num_queries * g.groups > INT_MAX / 2 || batch.max_k_len > int64_t{kBlock} << kMaxIdBits)
    return "too many query rows or keys";
  return {};
}

int64_t index_prefill8_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch,
                                       int64_t num_pages, int candidates) {
  return static_cast<char*>(make_workspace(geometry, batch, num_pages, candidates, nullptr).end) -
         static_cast<char*>(nullptr);
}

void index_prefill8(const IndexPrefill8Params& params, Stream stream) {
  const std::string reason =
      index_prefill8_supports(params.geometry, params.batch, params.candidates);
  M3_CHECK(reason.empty(), "index_select with 8-bit keys: {}", reason);
  M3_CHECK(params.keys.scale_P != nullptr,
           "index_select with 8-bit keys: they need scale_P [P], one scale per page");
  M3_CHECK(params.uncertified == nullptr ||
               (params.candidates == kExactCandidates && params.keys.error_P != nullptr &&
                params.keys.norm_P != nullptr),
           "index_select with 8-bit keys: certificates need {} candidates, error_P and norm_P, got "
           "{} candidates",
           kExactCandidates, params.candidates);
  if (params.batch.num_queries == 0) return;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  switch (params.candidates) {
    case 15:
      return run<15>(params, handle);
    case 24:
      return run<24>(params, handle);
    case 32:
      return run<32>(params, handle);
    default:
      return run<kExactCandidates>(params, handle);
  }
}

}  // namespace m3
