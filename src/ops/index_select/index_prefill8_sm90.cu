// Prefill selection with int8 index keys (index_prefill8.h). Per chunk of rows, after the candidates
// (index_prefill8_scan_sm90.cu):
//   count, place, scatter    (rescore) pairs of row and candidate, sorted by page
//   rescore   block-outer: a page of bf16 keys against the rows that have it as candidate
//   choose    the row's ids, and (exact) whether they are certified
// exact: tiles with a row that is not are scanned again in bf16, by the kernels of index_select_sm90.
//
// count: each CTA counts the pairs of its rows by page in shared memory and adds what it found to the
// pages' global counters, one atomic a page instead of one a pair.
// rescore: 3 CTAs an SM, each with 32 KB of keys and two buffers of 64 gathered queries. Bound by L2:
// 256 bytes of a query per pair (2 * 128 * 128 FLOP) and 32 KB of keys per 512 pairs.
#include <algorithm>
#include <climits>

#include "hopper/async_copy.cuh"
#include "hopper/fence.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ops/index_select/index_prefill8.cuh"
#include "ops/index_select/index_select_cuda.h"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

using namespace hopper;
using namespace index_prefill8_detail;

constexpr int kChunkQueries = 33792;  // at 4 groups 4 tiles for each of 132 SMs: whole waves
constexpr int kItemPairs = 512;
constexpr int kMaxIdBits = 17;

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

// --- pairs by page

constexpr int kPairRows = 128, kPairThreads = 512;  // of a CTA of count and scatter
constexpr int kCountedPages = 8192;                 // counters in shared memory at a time, 32 KB
template <int kCandidates>
constexpr int kPairsPerThread = kPairRows * kCandidates / kPairThreads;

__device__ __forceinline__ int64_t first_pair(int candidates) {
  return int64_t{blockIdx.x} * kPairRows * candidates;
}

// Pages of the thread's pairs, first_pair + i * kPairThreads + tid; -1: not a pair.
template <int kCandidates>
__device__ __forceinline__ void pages_of_pairs(const Params& p, int num_rows,
                                               int (&page)[kPairsPerThread<kCandidates>]) {
  using List = typename ListOf<kCandidates>::Type;
  __shared__ int64_t page_table[kPairRows];  // where the row's begins; -1: the row has no choice
  const int tid = threadIdx.x;
  if (tid < kPairRows) {
    const int local = blockIdx.x * kPairRows + tid;
    page_table[tid] = -1;
    if (local < num_rows) {
      const Row row = row_of(p, local);
      if (row.choice) page_table[tid] = row.seq.index * p.batch.max_pages;
    }
  }
  __syncthreads();
  const auto* entries =
      static_cast<const typename List::Entry*>(p.ws.candidates) + first_pair(kCandidates);
#pragma unroll
  for (int i = 0; i < kPairsPerThread<kCandidates>; ++i) {
    const int pair = i * kPairThreads + tid;
    const int64_t pages = page_table[pair / kCandidates];
    const auto entry = pages >= 0 ? entries[pair] : 0;
    page[i] = entry != 0 ? p.batch.page_table[pages + List::id(entry, p.id_bits)] : -1;
  }
}

template <int kCandidates>
__global__ void __launch_bounds__(kPairThreads) count_kernel(const Params p, int num_rows) {
  __shared__ int counter[kCountedPages];
  constexpr int kPairs = kPairsPerThread<kCandidates>;
  const int tid = threadIdx.x;
  int page[kPairs], place[kPairs];
  pages_of_pairs<kCandidates>(p, num_rows, page);
  int32_t* places = p.ws.place + first_pair(kCandidates);
  for (int first = 0; first < p.num_pages; first += kCountedPages) {
    const int pages = min(kCountedPages, p.num_pages - first);
    const auto counted = [&](int i) { return page[i] >= first && page[i] - first < pages; };
    for (int i = tid; i < pages; i += kPairThreads) counter[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (counted(i)) place[i] = atomicAdd(&counter[page[i] - first], 1);
    __syncthreads();
    // From here on a counter is the place of the CTA's first pair of that page.
    for (int i = tid; i < pages; i += kPairThreads) {
      const int mine = counter[i];
      if (mine > 0) counter[i] = atomicAdd(&p.ws.count[first + i], mine);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (counted(i)) places[i * kPairThreads + tid] = counter[page[i] - first] + place[i];
    __syncthreads();
  }
}

__global__ void __launch_bounds__(1024) place_kernel(const Params p) {
  __shared__ int scratch[32];
  __shared__ int ends[2];
  const int tid = threadIdx.x, lane = tid % 32;
  int pairs = 0, items = 0;
  for (int base = 0; base < p.num_pages; base += 1024) {
    const int page = base + tid;
    const int count = page < p.num_pages ? p.ws.count[page] : 0;
    const int cuts = (count + kItemPairs - 1) / kItemPairs;
    const int pairs_end = cta_scan_1024(count, scratch), items_end = cta_scan_1024(cuts, scratch);
    const int begin = pairs + pairs_end - count, item = items + items_end - cuts;
    if (page < p.num_pages) p.ws.page_begin[page] = begin;
    // The warp writes the items of its pages one page after the other: a page may have hundreds.
    for (int from = 0; from < 32; ++from) {
      const int num = __shfl_sync(kAll, cuts, from), at = __shfl_sync(kAll, item, from);
      const int first = __shfl_sync(kAll, begin, from), all = __shfl_sync(kAll, count, from);
      for (int i = lane; i < num; i += 32)
        p.ws.rescore_items[at + i] = {page - lane + from, first + i * kItemPairs,
                                      min(kItemPairs, all - i * kItemPairs)};
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
__global__ void __launch_bounds__(kPairThreads) scatter_kernel(const Params p, int num_rows) {
  int page[kPairsPerThread<kCandidates>];
  pages_of_pairs<kCandidates>(p, num_rows, page);
#pragma unroll
  for (int i = 0; i < kPairsPerThread<kCandidates>; ++i) {
    if (page[i] < 0) continue;
    const int64_t pair = first_pair(kCandidates) + i * kPairThreads + threadIdx.x;
    p.ws.pairs[p.ws.page_begin[page[i]] + p.ws.place[pair]] = static_cast<int32_t>(pair);
  }
}

// --- rescore

constexpr int kRescoreThreads = 128, kRescoreCtas = 3, kRescoreRows = 64;
constexpr int kHalfPageBytes = kBlock * 128, kPageBytes = 2 * kHalfPageBytes;
constexpr int kHalfRowsBytes = kRescoreRows * 128, kRowsBytes = 2 * kHalfRowsBytes;
constexpr int kRescoreSmemBytes = kPageBytes + 2 * kRowsBytes + 1024;

// Copies a warp's 16 queries of a step in the layout of the product's A operand; lane i has the pair of
// row i % 16. The four rows that a lane's neighbours copy with it lie in different banks.
template <int kCandidates>
__device__ __forceinline__ void gather_queries(char* rows, const char* queries, int pair, int warp,
                                               int lane) {
  const int chunk = lane % 16;  // 16 bytes of the row's 256
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 2 * i + lane / 16, its_pair = __shfl_sync(kAll, pair, row);
    char* to = rows + chunk / 8 * kHalfRowsBytes + (16 * warp + row) * 128 +
               ((chunk % 8) ^ (row % 8)) * 16;
    if (its_pair >= 0)
      async_copy_16(to, queries + int64_t{its_pair / kCandidates} * (kDim * 2) + chunk * 16);
  }
  async_copy_commit();
}

template <int kCandidates>
__global__ void __launch_bounds__(kRescoreThreads, kRescoreCtas)
    rescore_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const keys = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const rows = keys + kPageBytes;
  __shared__ uint64_t full;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  if (tid == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const uint64_t key_descriptor = descriptor_k_major(keys),
                 row_descriptor = descriptor_k_major(rows);
  const char* queries = static_cast<const char*>(p.qi_TRX) + int64_t{p.first_row} * (kDim * 2);
  const int num_items = *p.ws.num_rescore_items;
  int phase = 0;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x, phase ^= 1) {
    const RescoreItem item = p.ws.rescore_items[index];
    const int32_t* pairs = p.ws.pairs + item.begin;
    const auto pair_of_step = [&](int base) {
      const int at = base + 16 * warp + lane % 16;
      return at < item.count ? pairs[at] : -1;
    };
    int pair = pair_of_step(0), next_pair = pair_of_step(kRescoreRows);
    __syncthreads();  // the last item's keys and rows have been read
    if (tid == 0) {
      mbarrier_arrive_expect_tx(&full, kPageBytes);
      tma_load(keys, &x_map, &full, 0, item.page * kBlock);
      tma_load(keys + kHalfPageBytes, &x_map, &full, 64, item.page * kBlock);
    }
    gather_queries<kCandidates>(rows, queries, pair, warp, lane);
    int buffer = 0;
    for (int base = 0; base < item.count; base += kRescoreRows, buffer ^= 1) {
      async_copy_wait<0>();
      fence_async_shared();
      __syncthreads();  // every thread's copies are there, and the other buffer has been read
      gather_queries<kCandidates>(rows + (buffer ^ 1) * kRowsBytes, queries, next_pair, warp, lane);
      const int after = pair_of_step(base + 2 * kRescoreRows);
      if (base == 0) mbarrier_wait(&full, phase);
      const uint64_t query = descriptor_advance(row_descriptor, buffer * kRowsBytes);
      float acc[64];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        wgmma_bf16_ss(acc, descriptor_advance(query, k / 4 * kHalfRowsBytes + k % 4 * 32),
                      descriptor_advance(key_descriptor, k / 4 * kHalfPageBytes + k % 4 * 32),
                      k == 0 ? 0 : 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(acc);
      float best[2];
      row_maxima(acc, best[0], best[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int its_pair = __shfl_sync(kAll, pair, lane / 4 + 8 * half);
        best[half] = fmaxf(best[half], __shfl_xor_sync(kAll, best[half], 1));
        best[half] = fmaxf(best[half], __shfl_xor_sync(kAll, best[half], 2));
        if (lane % 4 == 0 && its_pair >= 0) p.ws.score[its_pair] = msa_canonical_score(best[half]);
      }
      pair = next_pair;
      next_pair = after;
    }
  }
}

// --- choose: a thread per row

// No block that is no candidate can have a bf16 score of `last` or more. See index_prefill8.h.
template <int kCandidates>
__device__ __forceinline__ bool is_certified(const Params& p, int local, float last) {
  using List = typename ListOf<kCandidates>::Type;
  const auto worst = static_cast<const typename List::Entry*>(
      p.ws.candidates)[int64_t{local} * kCandidates + kCandidates - 1];
  if (worst == 0) return true;  // every block was a candidate
  return p.ws.query_stat[local].x * List::largest_score(worst, p.id_bits) < last;
}

// The row's best candidates by their bf16 scores. It has at least kTopk.
template <int kCandidates>
__device__ __forceinline__ TopkList<kTopk - 1> best_rescored(const Params& p, int local) {
  using List = typename ListOf<kCandidates>::Type;
  TopkList<kTopk - 1> list;
  list.clear();
  const auto* entries = static_cast<const uint4*>(p.ws.candidates) + int64_t{local} * (kCandidates / 4);
  const auto* scores = reinterpret_cast<const float4*>(p.ws.score) + int64_t{local} * (kCandidates / 4);
#pragma unroll 1
  for (int i = 0; i < kCandidates / 4; ++i) {
    const uint4 four = entries[i];
    const float4 their = scores[i];
    const uint32_t entry[4] = {four.x, four.y, four.z, four.w};
    const float score[4] = {their.x, their.y, their.z, their.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int id = List::id(entry[j], p.id_bits);
      if (entry[j] != 0 && list.before(score[j], id, list.threshold(), list.id[kTopk - 2]))
        list.insert(score[j], id);
    }
  }
  return list;
}

constexpr int kChooseThreads = 128;

template <int kCandidates>
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const Params p, int num_rows) {
  const int local = blockIdx.x * kChooseThreads + threadIdx.x;
  if (local >= num_rows) return;
  const Row row = row_of(p, local);
  if (!row.mine) return;
  int32_t chosen[kTopk - 1] = {};
  if constexpr (kCandidates < kTopk) {
    using List = typename ListOf<kCandidates>::Type;
    const auto* entries = static_cast<const typename List::Entry*>(p.ws.candidates) +
                          int64_t{local} * kCandidates;
#pragma unroll
    for (int j = 0; j < kTopk - 1; ++j)
      if (row.choice) chosen[j] = List::id(entries[j], p.id_bits);
  } else if (row.choice) {
    const TopkList<kTopk - 1> list = best_rescored<kCandidates>(p, local);
#pragma unroll
    for (int j = 0; j < kTopk - 1; ++j) chosen[j] = list.id[j];
    if (p.uncertified != nullptr && !is_certified<kCandidates>(p, local, list.threshold())) {
      const int row0 = row.seq.q_begin * p.groups, at = p.first_row + local;
      const int tile0 = row0 + (at - row0) / kTileRows * kTileRows;
      p.ws.tile_flags[tile_number(tile0, row.seq.index)] = 1;
      atomicAdd(p.uncertified, 1);
    }
  }
  write_row<kTopk>(chosen, row.own,
                   p.ids_RTK + (int64_t{row.group} * p.batch.num_queries + row.query) * kTopk);
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
  const int64_t rows = chunk_rows(g, batch) + kTileRows,
                entry_bytes = candidates < kTopk ? 8 : 4;
  const int64_t max_lists = Schedule::max_lists(kMaxSms), pairs = rows * candidates;
  Workspace ws;
  workspace_take(at, ws.counters, 64);
  workspace_take(at, ws.items, Schedule::max_items(rows, batch.num_seqs, kMaxSms));
  workspace_take(at, ws.merges, max_lists);
  workspace_take(at, ws.lists, max_lists * kTileRows * candidates * entry_bytes);
  workspace_take(at, ws.codes, rows * kDim);
  workspace_take(at, ws.candidates, pairs * entry_bytes);
  ws.end = at;
  if (candidates < kTopk) return ws;
  workspace_take(at, ws.place, pairs);
  workspace_take(at, ws.pairs, pairs);
  workspace_take(at, ws.score, pairs);
  workspace_take(at, ws.count, num_pages);
  workspace_take(at, ws.page_begin, num_pages);
  workspace_take(at, ws.rescore_items, pairs / kItemPairs + std::min(pairs, num_pages) + 1);
  workspace_take(at, ws.num_rescore_items, 1);
  ws.end = at;
  if (candidates < kExactCandidates) return ws;
  workspace_take(at, ws.query_stat, rows);
  workspace_take(at, ws.tile_flags, num_tiles(g, batch));
  workspace_take(at, ws.bf16, index_select_sm90_workspace_bytes(g, batch));
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
      const unsigned pair_ctas = static_cast<unsigned>((buffer_rows + kPairRows - 1) / kPairRows);
      M3_CUDA_CHECK(cudaMemsetAsync(p.ws.count, 0, a.num_pages * 4, stream));
      count_kernel<kCandidates><<<pair_ctas, kPairThreads, 0, stream>>>(p, buffer_rows);
      place_kernel<<<1, 1024, 0, stream>>>(p);
      scatter_kernel<kCandidates><<<pair_ctas, kPairThreads, 0, stream>>>(p, buffer_rows);
      rescore<<<sms * kRescoreCtas, kRescoreThreads, kRescoreSmemBytes, stream>>>(x_map, p);
    }
    choose_kernel<kCandidates><<<(buffer_rows + kChooseThreads - 1) / kChooseThreads,
                                 kChooseThreads, 0, stream>>>(p, buffer_rows);
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
  const ProfileRange range("index_prefill8");
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
