// Block-outer half of the hybrid attention (hopper.md §6.4): an item is one history block of one
// group with up to 128 of the queries that selected it as pairs. S = Q K^T, one softmax within the
// block, O = P V; the unnormalised O goes out as bf16 in accumulator order with maximum and sum. No
// masks: a history block is complete and fully visible. Results do not depend on the order of the
// queries in an item.
//
// Persistent, one CTA per SM, items handed out group by group.
//   warpgroup 0: producer (1 warp): K and V once per item, Q of 4 gathered queries (64 rows) a
//   stage warpgroups 1 to 3: take the Q stages in turn; one warp per query.
// Shared memory: 2 x 64 KB K and V, 6 x 16 KB Q = 224 KB. 4 * 64 * 128 * 128 FLOP per stage.
#include "hopper/fence.cuh"
#include "hopper/tma.cuh"
#include "ops/attend/attend_sm90.cuh"

namespace m3 {
namespace {

using namespace attend_sm90_detail;

constexpr int kConsumers = 3, kThreads = 128 * (kConsumers + 1);
constexpr int kQueryStages = 6, kStageQueries = 4, kKvBuffers = 2;
static_assert(kQueryStages % kConsumers == 0, "a stage belongs to one warpgroup");
constexpr int kHalfStageBytes = kStageQueries * kHeads * 128, kStageBytes = 2 * kHalfStageBytes;
constexpr int kKvBytes = 2 * kTileBytes;
constexpr int kSmemBytes = kKvBuffers * kKvBytes + kQueryStages * kStageBytes + 1024;

struct Params {
  MsaBatch batch;
  int groups, chunk, max_items, pairs_per_group;
  int64_t max_blocks;
  float scale_log2;
  AttendWorkspace ws;
};

struct __align__(16) Shared {
  uint64_t kv_full[kKvBuffers], kv_empty[kKvBuffers];
  uint64_t query_full[kQueryStages], query_empty[kQueryStages];
  int32_t num_stages[kKvBuffers];  // of the item; -1: no more work
  int4 partial[kQueryStages];      // of the stage's four queries
};

__device__ __forceinline__ void produce(const Params& p, const CUtensorMap& query_map,
                                        const CUtensorMap& k_map, const CUtensorMap& v_map,
                                        char* smem_kv, char* smem_query, Shared& shared, int lane) {
  const int32_t* num_items = p.ws.num_items + p.chunk * p.groups;
  int32_t* next_item = p.ws.counters + AttendWorkspace::kPerChunk + 2 * p.chunk + 1;
  int stage_count = 0;
  for (int round = 0;; ++round) {
    const int buffer = round % kKvBuffers;
    int index = 0;
    if (lane == 0) index = atomicAdd(next_item, 1);
    index = __shfl_sync(0xffffffffu, index, 0);
    int group = 0;
    while (group < p.groups && index >= num_items[group]) index -= num_items[group++];
    const bool done = group == p.groups;
    const int64_t segment = int64_t{p.chunk} * p.groups + group;
    AttendRowsItem item = {0, 0, 0};
    if (!done) item = p.ws.items[segment * p.max_items + index];
    if (lane == 0) {
      mbarrier_wait(&shared.kv_empty[buffer], (round / kKvBuffers & 1) ^ 1);
      shared.num_stages[buffer] = done ? -1 : (item.count + kStageQueries - 1) / kStageQueries;
      if (done) {
        mbarrier_arrive(&shared.kv_full[buffer]);
      } else {
        const int n = msa_find(p.ws.block_begin, p.batch.num_seqs, item.block);
        const KvPlace at =
            kv_place(p.batch, msa_sequence(p.batch, n), item.block - p.ws.block_begin[n]);
        char* to = smem_kv + buffer * kKvBytes;
        mbarrier_arrive_expect_tx(&shared.kv_full[buffer], kKvBytes);
        tma_load(to, &k_map, &shared.kv_full[buffer], 0, at.token, group, at.page);
        tma_load(to + kHalfBytes, &k_map, &shared.kv_full[buffer], 64, at.token, group, at.page);
        tma_load(to + kTileBytes, &v_map, &shared.kv_full[buffer], 0, at.token, group, at.page);
        tma_load(to + kTileBytes + kHalfBytes, &v_map, &shared.kv_full[buffer], 64, at.token, group,
                 at.page);
      }
    }
    if (done) return;
    const AttendPair* pairs = p.ws.pairs + segment * p.pairs_per_group + item.begin;
    // The warp reads 32 pairs, then feeds 8 stages.
    for (int base = 0; base < item.count; base += 32) {
      AttendPair mine = {0, -1};
      if (base + lane < item.count) mine = pairs[base + lane];
      for (int first = 0; first < 32 && base + first < item.count;
           first += kStageQueries, ++stage_count) {
        const int stage = stage_count % kQueryStages;
        const int count = min(kStageQueries, item.count - base - first);
        // Lane i feeds half i % 2 of query i / 2.
        const int query = __shfl_sync(0xffffffffu, mine.query, first + lane / 2 % kStageQueries);
        int partial[kStageQueries];
#pragma unroll
        for (int i = 0; i < kStageQueries; ++i) {
          partial[i] = __shfl_sync(0xffffffffu, mine.partial, first + i);
        }
        if (lane == 0) {
          mbarrier_wait(&shared.query_empty[stage], (stage_count / kQueryStages & 1) ^ 1);
          shared.partial[stage] = make_int4(partial[0], partial[1], partial[2], partial[3]);
          mbarrier_arrive_expect_tx(&shared.query_full[stage], count * kHeads * kDim * 2);
        }
        __syncwarp();
        if (lane < 2 * count) {
          char* to = smem_query + stage * kStageBytes + lane % 2 * kHalfStageBytes +
                     lane / 2 * (kHeads * 128);
          tma_load(to, &query_map, &shared.query_full[stage], lane % 2 * 64, group * kHeads, query);
        }
        __syncwarp();
      }
    }
  }
}

__device__ __forceinline__ void consume(const Params& p, const char* smem_kv,
                                        const char* smem_query, Shared& shared, int consumer,
                                        int warp, int lane) {
  const uint64_t kv = descriptor_k_major(smem_kv), queries = descriptor_k_major(smem_query);
  const uint64_t kv_values = descriptor_mn_major(smem_kv + kTileBytes, kHalfBytes);
  int turn = 0;  // stages before this item
  for (int round = 0;; ++round) {
    const int buffer = round % kKvBuffers;
    mbarrier_wait(&shared.kv_full[buffer], round / kKvBuffers & 1);
    // Lane 0 gives buffers back for its warp, so it alone reads what the producer writes for the
    // next use.
    const int count = __shfl_sync(0xffffffffu, lane == 0 ? shared.num_stages[buffer] : 0, 0);
    if (count < 0) return;
    const int end = turn + count;
    for (int at = turn + (consumer + kConsumers - turn % kConsumers) % kConsumers; at < end;
         at += kConsumers) {
      const int stage = at % kQueryStages;
      mbarrier_wait(&shared.query_full[stage], at / kQueryStages & 1);
      float s[64];
      issue_qk<kHalfStageBytes>(s, descriptor_advance(queries, stage * kStageBytes),
                                descriptor_advance(kv, buffer * kKvBytes));
      int partial = 0;
      if (lane == 0) partial = reinterpret_cast<const int32_t*>(&shared.partial[stage])[warp % 4];
      partial = __shfl_sync(0xffffffffu, partial, 0);
      wgmma_wait<0>();
      wgmma_pin(s);
      if (lane == 0) mbarrier_arrive(&shared.query_empty[stage]);
      float top[2], sum[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        top[row] = row_maximum(s, row);
        sum[row] = exponentiate_row(s, row, top[row], p.scale_log2);
      }
      uint32_t weights[8][4];
      pack_weights(s, weights);
      float o[64];
      issue_pv<false>(o, weights, descriptor_advance(kv_values, buffer * kKvBytes));
      wgmma_wait<0>();
      wgmma_pin(o);
      store_partial(p.ws.partial_o, p.ws.partial_ml, partial, o, top, sum, lane);
    }
    if (lane == 0) mbarrier_arrive(&shared.kv_empty[buffer]);
    turn = end;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    attend_rows_kernel(const __grid_constant__ CUtensorMap query_map,
                       const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map,
                       const __grid_constant__ Params p) {
  extern __shared__ char smem_raw[];
  char* const smem = smem_raw + ((1024 - smem_address(smem_raw) % 1024) % 1024);
  char* const smem_query = smem + kKvBuffers * kKvBytes;
  __shared__ Shared shared;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kKvBuffers; ++i) {
      mbarrier_init(&shared.kv_full[i], 1);
      mbarrier_init(&shared.kv_empty[i], 4 * kConsumers);  // one lane of each consumer warp
    }
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.query_empty[i], 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (tid < 128) {  // 128 x 56 + 384 x 152 registers: as many as the launch gives, 512 x 128
    registers_decrease<56>();
    if (tid < 32) produce(p, query_map, k_map, v_map, smem, smem_query, shared, tid);
  } else {
    registers_increase<152>();
    consume(p, smem, smem_query, shared, tid / 128 - 1, tid / 32, tid % 32);
  }
}

}  // namespace

void attend_rows(const AttendCudaArgs& args, int chunk, const AttendSizes& sizes,
                 const AttendWorkspace& ws, Stream stream) {
  Params p;
  p.batch = args.batch;
  p.groups = args.geometry.groups;
  p.chunk = chunk;
  p.max_items = static_cast<int>(sizes.max_items);
  p.pairs_per_group = sizes.chunk_tiles * kQueries * args.geometry.topk;
  p.max_blocks = sizes.max_blocks;
  p.scale_log2 = static_cast<float>(args.geometry.logit_scale()) * kLog2e;
  p.ws = ws;
  M3_CUDA_CHECK(cudaFuncSetAttribute(attend_rows_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  attend_rows_kernel<<<sm_count(), kThreads, kSmemBytes,
                       static_cast<cudaStream_t>(stream.handle)>>>(
      query_map(args, 1), kv_map(args, args.k), kv_map(args, args.v), p);
  M3_CUDA_CHECK(cudaGetLastError());
}

}  // namespace m3
