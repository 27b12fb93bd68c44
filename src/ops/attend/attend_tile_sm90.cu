// attend for prefill on Hopper, query-outer (hopper.md §5.3 C, §6.4): a tile of 8 neighbouring queries of
// one group (128 rows of 16 heads) runs once through the union of the blocks they selected; with all
// blocks listed it is the dense causal kernel. bf16, G = 16, D = B = 128.
//
// Persistent, one CTA per SM, tiles handed out in sequence order, one group at a time, so that neighbouring
// tiles find their blocks in L2.
//   warpgroup 0: producer (1 warp): forms the union (32 lanes hold the 8 lists), loads Q, K and V tiles.
//   warpgroups 1, 2: 4 queries each, one warp per query. S = Q K^T of the next block runs together with
//   O += P V of the last one; blocks that none of the 4 queries wants are skipped, and a warp whose query
//   does not want the block leaves P = 0.
// Shared memory: 2 Q tiles x 32 KB, 5 stages x 32 KB (K and V in turn) = 224 KB; 128-byte swizzle.
// Work: 4 * 128 * 128 * 128 FLOP per 64 KB of K and V (L2).
#include <cuda_runtime.h>

#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ops/attend/attend_sm90.h"
#include "ops/common/msa_device.cuh"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

using namespace hopper;

constexpr int kDim = 128, kBlock = 128, kHeads = 16, kQueries = kAttendTileQueries;
constexpr int kRows = kQueries * kHeads;
constexpr int kStages = 5, kQueryBuffers = 2;
constexpr int kHalfBytes = kBlock * 128, kTileBytes = 2 * kHalfBytes;          // K, V
constexpr int kHalfQueryBytes = kRows * 128, kQueryBytes = 2 * kHalfQueryBytes;
constexpr int kSmemBytes = kQueryBuffers * kQueryBytes + kStages * kTileBytes + 1024;
constexpr int kThreads = 384;
constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;

struct Params {
  MsaBatch batch;
  const int32_t* ids_RTK;  // or absent: dense
  __nv_bfloat16* o_THD;
  float* lse_TH;
  int groups, topk;
  float scale_log2;
  AttendTileWorkspace ws;
};

// Tiles of a sequence: aligned positions floor(first / 8) .. floor(last / 8).
__device__ __forceinline__ int floor_tile(int position) { return position >> 3; }
__device__ __forceinline__ int num_tiles(const MsaSequence& s) {
  return s.q_len == 0 ? 0 : floor_tile(s.first_position + s.q_len - 1) - floor_tile(s.first_position) + 1;
}

__global__ void __launch_bounds__(1024) attend_setup_kernel(const MsaBatch batch, int groups, AttendTileWorkspace ws) {
  __shared__ int prefix[1024];
  __shared__ int carry;
  const int tid = threadIdx.x;
  if (tid == 0) carry = 0;
  __syncthreads();
  for (int base = 0; base < batch.num_seqs; base += 1024) {
    const int n = base + tid;
    const int mine = n < batch.num_seqs ? num_tiles(msa_sequence(batch, n)) * groups : 0;
    int inclusive = mine;
    for (int step = 1; step < 1024; step *= 2) {
      prefix[tid] = inclusive;
      __syncthreads();
      if (tid >= step) inclusive += prefix[tid - step];
      __syncthreads();
    }
    if (n < batch.num_seqs) ws.unit_begin[n] = carry + inclusive - mine;
    __syncthreads();
    if (tid == 1023) carry += inclusive;
    __syncthreads();
  }
  if (tid == 0) {
    ws.unit_begin[batch.num_seqs] = carry;
    ws.counters[0] = carry;
    ws.counters[1] = 0;
    ws.counters[2] = 0;
  }
}

struct TileWork {
  int32_t row0;      // query row of the tile's first position; rows outside [begin, end) are not ours
  int32_t begin, end;
  int32_t position0;  // position of row0
  int32_t group;     // -1: no more work
  int32_t has_entries;
};

// Entry of the ring, written with the K stage.
constexpr uint32_t kOwnBlock = 1u << 8, kLastEntry = 1u << 9;

struct __align__(8) Barriers {
  uint64_t query_full[kQueryBuffers], query_empty[kQueryBuffers];
  uint64_t full[kStages], empty[kStages];
};

struct Shared {
  Barriers bars;
  TileWork work[kQueryBuffers];
  uint32_t entry[kStages];
};

constexpr int kNone = 0x7fffffff;  // no block

// The producer's walk over one tile: the ids of the 8 queries in registers, 4 lanes per query.
template <int kTopk>
struct Union {
  static constexpr int kPerLane = kTopk / 4;
  int32_t id[kPerLane];

  __device__ __forceinline__ void load(const Params& p, const TileWork& w, int lane) {
    const int row = w.row0 + lane / 4;
    const bool live = row >= w.begin && row < w.end;
    const int32_t* ids = p.ids_RTK + (w.group * p.batch.num_queries + row) * kTopk + lane % 4 * kPerLane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      id[j] = live ? ids[j] : -1;
      if (id[j] < 0) id[j] = kNone;
    }
  }
  __device__ __forceinline__ int next() const {
    int low = id[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) low = min(low, id[j]);
    return static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<uint32_t>(low)));
  }
  // Removes block b and returns the queries that wanted it.
  __device__ __forceinline__ uint32_t take(int b) {
    bool mine = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (id[j] == b) {
        mine = true;
        id[j] = kNone;
      }
    }
    uint32_t lanes = __ballot_sync(0xffffffffu, mine);
    lanes |= lanes >> 1;
    lanes |= lanes >> 2;  // bit 4q: any of query q's lanes
    uint32_t mask = 0;
#pragma unroll
    for (int q = 0; q < kQueries; ++q) mask |= (lanes >> (4 * q) & 1) << q;
    return mask;
  }
};

__device__ __forceinline__ void load_stage(const CUtensorMap& map, char* smem_stages, Shared& shared,
                                           int step, uint32_t entry, int token, int group, int page) {
  const int stage = step % kStages;
  mbarrier_wait(&shared.bars.empty[stage], (step / kStages & 1) ^ 1);
  shared.entry[stage] = entry;
  mbarrier_arrive_expect_tx(&shared.bars.full[stage], kTileBytes);
  char* to = smem_stages + stage * kTileBytes;
  tma_load(to, &map, &shared.bars.full[stage], 0, token, group, page);
  tma_load(to + kHalfBytes, &map, &shared.bars.full[stage], 64, token, group, page);
}

template <int kTopk>  // 0: dense
__device__ __forceinline__ void produce(const Params& p, const CUtensorMap& query_map, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, char* smem_query, char* smem_stages, Shared& shared,
                                        int lane) {
  Barriers& bars = shared.bars;
  const bool paged = p.batch.layout == KvLayout::kPaged;
  const int num_units = p.ws.counters[0];
  int step = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    int unit = 0;
    if (lane == 0) unit = atomicAdd(&p.ws.counters[1], 1);
    unit = __shfl_sync(0xffffffffu, unit, 0);
    TileWork work = {0, 0, 0, 0, -1, 0};
    MsaSequence seq;
    if (unit < num_units) {
      const int n = msa_find(p.ws.unit_begin, p.batch.num_seqs, unit);
      seq = msa_sequence(p.batch, n);
      const int local = unit - p.ws.unit_begin[n], tiles = num_tiles(seq);
      // Dense tiles grow with the position: longest first. Sparse ones follow the sequence.
      const int tile = kTopk == 0 ? tiles - 1 - local / p.groups : local % tiles;
      work.group = kTopk == 0 ? local % p.groups : local / tiles;
      work.position0 = (floor_tile(seq.first_position) + tile) * kQueries;
      work.row0 = seq.q_begin + work.position0 - seq.first_position;
      work.begin = seq.q_begin;
      work.end = seq.q_begin + seq.q_len;
    }
    const int own = work.position0 < 0 || work.group < 0 ? -1 : work.position0 / kBlock;
    Union<kTopk == 0 ? 4 : kTopk> ids;
    if constexpr (kTopk == 0) {
      work.has_entries = own >= 0;
    } else if (work.group >= 0) {
      ids.load(p, work, lane);
      work.has_entries = ids.next() != kNone;
    }
    if (lane == 0) {
      mbarrier_wait(&bars.query_empty[buffer], (round / kQueryBuffers & 1) ^ 1);
      shared.work[buffer] = work;
      if (work.group < 0) {
        mbarrier_arrive(&bars.query_full[buffer]);
      } else {
        mbarrier_arrive_expect_tx(&bars.query_full[buffer], kQueryBytes);
        char* q = smem_query + buffer * kQueryBytes;
        tma_load(q, &query_map, &bars.query_full[buffer], 0, work.group * kHeads, work.row0);
        tma_load(q + kHalfQueryBytes, &query_map, &bars.query_full[buffer], 64, work.group * kHeads, work.row0);
      }
    }
    if (work.group < 0) return;

    const auto push = [&](int block, uint32_t entry) {
      if (lane == 0) {
        const int page = paged ? p.batch.page_table[seq.index * p.batch.max_pages + block] : 0;
        const int token = paged ? 0 : seq.k_begin + block * kBlock;
        load_stage(k_map, smem_stages, shared, step, entry, token, work.group, page);
        load_stage(v_map, smem_stages, shared, step + 1, entry, token, work.group, page);
      }
      step += 2;
      __syncwarp();
    };

    if constexpr (kTopk == 0) {
      uint32_t live = 0;
      for (int q = 0; q < kQueries; ++q) {
        if (work.row0 + q >= work.begin && work.row0 + q < work.end) live |= 1u << q;
      }
      for (int i = 0; i <= own; ++i) {  // the own block first: every row has a finite maximum from then on
        push(i == 0 ? own : i - 1, live | (i == 0 ? kOwnBlock : 0) | (i == own ? kLastEntry : 0));
      }
    } else {
      uint32_t mask = own >= 0 ? ids.take(own) : 0;
      int block = own;
      uint32_t flags = kOwnBlock;
      while (true) {  // one entry behind, so that the last one is known
        const int next = ids.next();
        if (mask != 0) push(block, mask | flags | (next == kNone ? kLastEntry : 0));
        if (next == kNone) break;
        block = next;
        mask = ids.take(next);
        flags = 0;
      }
    }
  }
}

// S = Q K^T for 64 rows: 8 products, committed.
__device__ __forceinline__ void issue_qk(float (&s)[64], uint64_t query, uint64_t keys) {
  wgmma_pin(s);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t in_half = k % 4 * 32;
    wgmma_bf16_ss(s, descriptor_advance(query, k / 4 * kHalfQueryBytes + in_half),
                  descriptor_advance(keys, k / 4 * kHalfBytes + in_half), k == 0 ? 0 : 1);
  }
  wgmma_commit();
}

// O += P V: 8 steps of 16 keys, committed.
__device__ __forceinline__ void issue_pv(float (&o)[64], uint32_t (&weights)[8][4], uint64_t values) {
  wgmma_pin(o);
  wgmma_pin(weights);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlock / 16; ++k) {
    wgmma_bf16_rs<1>(o, weights[k], descriptor_advance(values, k * 16 * 128), 1);
  }
  wgmma_commit();
}

struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};  // of the raw logits, rows lane / 4 and lane / 4 + 8
  float sum[2] = {0, 0};                      // of this lane's columns
};

// Turns logits into weights in place; `old` gets the factors for what was summed before.
__device__ __forceinline__ void softmax_step(float (&s)[64], RowState& state, float (&old)[2], float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float top = fmaxf(s[2 * row], s[2 * row + 1]);
#pragma unroll
    for (int j = 4; j < 64; j += 4) top = fmaxf(top, fmaxf(s[j + 2 * row], s[j + 2 * row + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    top = fmaxf(top, state.maximum[row]);
    old[row] = exp2_approx((state.maximum[row] - top) * scale_log2);
    state.maximum[row] = top;
    const float shift = top * scale_log2;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 64; j += 4) {
      s[j + 2 * row] = exp2_approx(fmaf(s[j + 2 * row], scale_log2, -shift));
      s[j + 2 * row + 1] = exp2_approx(fmaf(s[j + 2 * row + 1], scale_log2, -shift));
      sum += s[j + 2 * row] + s[j + 2 * row + 1];
    }
    state.sum[row] = state.sum[row] * old[row] + sum;
  }
}

__device__ __forceinline__ void pack_weights(const float (&s)[64], uint32_t (&weights)[8][4]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[k][i] = pack_bf16x2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
}

// Writes O and LSE of one warp's query (16 rows of 128 channels) and reports non-finite rows.
__device__ __forceinline__ void write_query(const Params& p, const TileWork& work, int query, float (&o)[64],
                                            const RowState& state, int lane) {
  const int row = work.row0 + query;
  if (row < work.begin || row >= work.end) return;
  const int H = p.groups * kHeads;
  float finite = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    const int head = work.group * kHeads + lane / 4 + 8 * half;
    if (lane % 4 == 0 && p.lse_TH != nullptr) {
      p.lse_TH[int64_t{row} * H + head] =
          sum == 0 ? -INFINITY : state.maximum[half] * (p.scale_log2 * kLn2) + logf(sum);
    }
    __nv_bfloat16* out = p.o_THD + (int64_t{row} * H + head) * kDim;
    // 4 x 4 transposes inside each quad turn 4-byte pieces into 16-byte stores.
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = o[4 * (j + i) + 2 * half] * inverse, y = o[4 * (j + i) + 2 * half + 1] * inverse;
        finite += (x - x) + (y - y);
        w[i] = pack_bf16x2(x, y);
      }
      const bool odd = lane & 1, high = lane & 2;
      const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
      const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
      const uint32_t even0 = odd ? a : w[0], even1 = odd ? w[1] : a;  // columns 0, 1 of row (odd)
      const uint32_t even2 = odd ? b : w[2], even3 = odd ? w[3] : b;
      const uint32_t c = __shfl_xor_sync(0xffffffffu, high ? even0 : even2, 2);
      const uint32_t d = __shfl_xor_sync(0xffffffffu, high ? even1 : even3, 2);
      const uint4 piece = high ? make_uint4(c, d, even2, even3) : make_uint4(even0, even1, c, d);
      *reinterpret_cast<uint4*>(out + 8 * (j + lane % 4)) = piece;
    }
  }
  if (__any_sync(0xffffffffu, finite != 0.0f) && lane == 0) {
    p.ws.repair[atomicAdd(&p.ws.counters[2], 1)] = {row, work.group};
  }
}

__device__ __forceinline__ void consume(const Params& p, const char* smem_query, const char* smem_stages,
                                        Shared& shared, int consumer, int warp, int lane) {
  Barriers& bars = shared.bars;
  const int query = consumer * 4 + warp % 4;  // of the tile
  const bool releases = warp % 4 == 0 && lane == 0;
  const uint64_t stage_keys = descriptor_k_major(smem_stages), stage_values = descriptor_mn_major(smem_stages, kHalfBytes);
  int step = 0;
  const auto wait_full = [&](int at) { mbarrier_wait(&bars.full[at % kStages], at / kStages & 1); };
  const auto release = [&](int at) {
    if (releases) mbarrier_arrive(&bars.empty[at % kStages]);
  };

  for (int round = 0;; ++round) {
    const int buffer = round % kQueryBuffers;
    mbarrier_wait(&bars.query_full[buffer], round / kQueryBuffers & 1);
    if (__shfl_sync(0xffffffffu, shared.work[buffer].group, 0) < 0) return;
    const uint64_t query_rows = descriptor_k_major(smem_query + buffer * kQueryBytes + consumer * 64 * 128);

    RowState state;
    float o[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) o[j] = 0;
    uint32_t weights[8][4];
    float s[64];
    // Next entry that any of this warpgroup's queries wants; the others are given back unused.
    int at = 0;
    uint32_t entry = __shfl_sync(0xffffffffu, shared.work[buffer].has_entries, 0) ? 0 : kLastEntry;
    const auto advance = [&] {
      while (!(entry & kLastEntry)) {
        at = step;
        step += 2;
        wait_full(at);
        entry = __shfl_sync(0xffffffffu, shared.entry[at % kStages], 0);
        if (entry >> (4 * consumer) & 0xf) return true;
        wait_full(at + 1);
        release(at);
        release(at + 1);
      }
      return false;
    };
    const auto wanted = [&] { return (entry >> query & 1) != 0; };
    const auto clear_logits = [&] {
#pragma unroll
      for (int j = 0; j < 64; ++j) s[j] = 0;
    };
    float old[2];

    if (advance()) {
      issue_qk(s, query_rows, descriptor_advance(stage_keys, at % kStages * kTileBytes));
      wgmma_wait<0>();
      wgmma_pin(s);
      release(at);
      if (wanted()) {
        if (entry & kOwnBlock) {  // the only block that a row may see in part
          const int limit = shared.work[buffer].position0 % kBlock + query;  // last visible column
#pragma unroll
          for (int j = 0; j < 64; ++j) {
            if (8 * (j / 4) + 2 * (lane % 4) + j % 2 > limit) s[j] = -INFINITY;
          }
        }
        softmax_step(s, state, old, p.scale_log2);
      } else {
        clear_logits();
      }
      pack_weights(s, weights);
      int values = at + 1;  // ring position of the V tile that `weights` belong to
      while (advance()) {
        wait_full(values);  // loaded before this entry's K
        issue_qk(s, query_rows, descriptor_advance(stage_keys, at % kStages * kTileBytes));
        issue_pv(o, weights, descriptor_advance(stage_values, values % kStages * kTileBytes));
        wgmma_wait<1>();
        wgmma_pin(s);
        release(at);
        old[0] = old[1] = 1;
        if (wanted()) {
          softmax_step(s, state, old, p.scale_log2);
        } else {
          clear_logits();
        }
        wgmma_wait<0>();
        wgmma_pin(o);
        release(values);
#pragma unroll
        for (int j = 0; j < 64; ++j) o[j] *= old[j / 2 % 2];
        pack_weights(s, weights);
        values = at + 1;
      }
      wait_full(values);
      issue_pv(o, weights, descriptor_advance(stage_values, values % kStages * kTileBytes));
      wgmma_wait<0>();
      wgmma_pin(o);
      release(values);
    }
    const TileWork work = shared.work[buffer];
    mbarrier_arrive(&bars.query_empty[buffer]);
    write_query(p, work, query, o, state, lane);
  }
}

template <int kTopk>
__global__ void __launch_bounds__(kThreads, 1)
    attend_tile_kernel(const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const smem = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const smem_stages = smem + kQueryBuffers * kQueryBytes;
  __shared__ Shared shared;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(&shared.bars.query_full[i], 1);
      mbarrier_init(&shared.bars.query_empty[i], 256);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.bars.full[i], 1);
      mbarrier_init(&shared.bars.empty[i], 2);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (tid < 128) {
    registers_decrease<32>();
    if (tid < 32) produce<kTopk>(p, query_map, k_map, v_map, smem, smem_stages, shared, tid);
  } else {
    registers_increase<240>();
    consume(p, smem, smem_stages, shared, tid / 128 - 1, tid / 32, tid % 32);
  }
}

int sm_count() {
  static const int count = [] {
    int device = 0, value = 0;
    M3_CUDA_CHECK(cudaGetDevice(&device));
    M3_CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
    return value;
  }();
  return count;
}

int64_t align_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

AttendTileWorkspace make_workspace(const AttendCudaArgs& a) {
  char* base = static_cast<char*>(a.workspace);
  AttendTileWorkspace ws;
  ws.counters = reinterpret_cast<int32_t*>(base);
  ws.unit_begin = reinterpret_cast<int32_t*>(base + 256);
  ws.repair = reinterpret_cast<AttendRepairRow*>(base + 256 + align_up((a.batch.num_seqs + 1) * 4));
  return ws;
}

// k or v as (channel, token, head, page); a packed tensor is one page.
CUtensorMap kv_map(const AttendCudaArgs& a, const void* data) {
  const int64_t R = a.geometry.groups, row = kDim * 2;
  if (a.batch.layout == KvLayout::kPaged) {
    return tensor_map_create(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                             {{kDim, 0, 64}, {kBlock, row, kBlock}, {R, kBlock * row, 1}, {a.num_pages, R * kBlock * row, 1}},
                             MapSwizzle::k128Bytes);
  }
  return tensor_map_create(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           {{kDim, 0, 64}, {a.num_pages, R * row, kBlock}, {R, row, 1}, {1, a.num_pages * R * row, 1}},
                           MapSwizzle::k128Bytes);
}

template <int kTopk>
void launch(const AttendCudaArgs& a, cudaStream_t stream) {
  const int64_t H = int64_t{a.geometry.groups} * kHeads;
  const CUtensorMap query_map =
      tensor_map_create(a.q_THD, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        {{kDim, 0, 64}, {H, kDim * 2, kHeads}, {a.batch.num_queries, H * kDim * 2, kQueries}},
                        MapSwizzle::k128Bytes);
  Params p;
  p.batch = a.batch;
  p.ids_RTK = a.lists;
  p.o_THD = static_cast<__nv_bfloat16*>(a.o_THD);
  p.lse_TH = a.lse_TH;
  p.groups = a.geometry.groups;
  p.topk = a.geometry.topk;
  p.scale_log2 = static_cast<float>(a.geometry.logit_scale()) * kLog2e;
  p.ws = make_workspace(a);
  const auto kernel = attend_tile_kernel<kTopk>;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  attend_setup_kernel<<<1, 1024, 0, stream>>>(a.batch, p.groups, p.ws);
  kernel<<<sm_count(), kThreads, kSmemBytes, stream>>>(query_map, kv_map(a, a.k), kv_map(a, a.v), p);
  M3_CUDA_CHECK(cudaGetLastError());
  attend_repair(a, p.ws.repair, p.ws.counters + 2, {stream});
}

}  // namespace

int64_t attend_tile_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch) {
  return 256 + align_up((batch.num_seqs + 1) * 4) +
         align_up(batch.num_queries * geometry.groups * sizeof(AttendRepairRow));
}

void attend_tile_sm90(const AttendCudaArgs& args, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (args.support.kind == AttendSupport::Kind::kFull) return launch<0>(args, handle);
  switch (args.geometry.topk) {
    case 4: return launch<4>(args, handle);
    case 8: return launch<8>(args, handle);
    case 16: return launch<16>(args, handle);
    case 32: return launch<32>(args, handle);
    default: M3_FAIL("attend: the Hopper path has topk 4, 8, 16 and 32, got {}", args.geometry.topk);
  }
}

}  // namespace m3
