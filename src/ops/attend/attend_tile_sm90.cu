// Query-outer half of the prefill attention on Hopper (hopper.md §6.4): a tile of 8 neighbouring
// queries of one group (128 rows of 16 heads) runs once through its shared blocks, then adds the
// partial results of its pairs, and writes O and LSE. With all blocks listed it is the dense causal
// kernel.
//
// Persistent, one CTA per SM, tiles handed out in sequence order, one group at a time, so that
// neighbouring tiles find their blocks in L2.
//   warp 0: loads K and V tiles and partial results into the ring, as the plan says.
//   warp 1: plans one tile ahead (attend_tile_plan.cuh).
//   warp 2: loads Q.
//   warpgroups 1, 2: 4 queries each, one warp per query. S = Q K^T of the next block runs together
//           with O += P V of the last one. Blocks that none of the 4 queries wants are given back
//           unused; a warp whose query does not want the block leaves P = 0.
// Shared memory: Q tile 32 KB, 6 stages x 32 KB (K and V in turn, or one partial result of each of
// the 8 queries) = 224 KB; 128-byte swizzle. Work: 4 * 128 * 128 * 128 FLOP per 64 KB of K and V.
#include <algorithm>

#include "hopper/dependent_launch.cuh"
#include "hopper/fence.cuh"
#include "hopper/tma.cuh"
#include "ops/attend/attend_tile_plan.cuh"
#include "ops/attend/attend_tile_softmax.cuh"

namespace m3 {
namespace {

using namespace attend_tile_detail;

template <int kTopk>
__device__ __forceinline__ void load_queries(const CUtensorMap& query_map, Shared<kTopk>& shared) {
  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    mbarrier_wait(&shared.plan_full[buffer], round / kBuffers & 1);
    const int group = shared.work[buffer].group, row = shared.work[buffer].rows.row0;
    mbarrier_arrive(&shared.plan_empty[buffer]);
    if (group < 0) return;
    mbarrier_wait(&shared.query_empty, (round & 1) ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(&shared.query_full, kQueryBytes);
      tma_load(shared.query, &query_map, &shared.query_full, 0, group * kHeads, row);
      tma_load(shared.query + kHalfQueryBytes, &query_map, &shared.query_full, 64, group * kHeads,
               row);
    }
    __syncwarp();
  }
}

template <int kTopk, bool kSplit>
__device__ __forceinline__ void load_tiles(const Params& p, const CUtensorMap& k_map,
                                           const CUtensorMap& v_map, Shared<kTopk>& shared,
                                           int lane) {
  int stage = 0, phase = 1;                // of the empty barriers
  const auto open = [&](uint32_t bytes) {  // every lane waits: any may issue a copy
    mbarrier_wait(&shared.empty[stage], phase);
    if (lane == 0) mbarrier_arrive_expect_tx(&shared.full[stage], bytes);
  };
  const auto close = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };
  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    mbarrier_wait(&shared.plan_full[buffer], round / kBuffers & 1);
    const TileWork& work = shared.work[buffer];
    const int group = work.group;
    if (group < 0) return;
    const MsaSequence seq = msa_sequence(p.batch, work.seq);
    const int num_blocks = work.num_blocks;
    // Page numbers are read 32 at a time.
    for (int base = 0; base < num_blocks; base += 32) {
      KvPlace mine = {0, 0};
      if (base + lane < num_blocks) {
        mine = kv_place(p.batch, seq,
                        static_cast<int>(plan_entry<kTopk, kSplit>(shared, buffer, base + lane) >>
                                         kBlockShift));
      }
      for (int i = 0; i < min(32, num_blocks - base); ++i) {
        const int token = __shfl_sync(0xffffffffu, mine.token, i),
                  page = __shfl_sync(0xffffffffu, mine.page, i);
        open(kTileBytes);
        if (lane == 0) {
          tma_load(shared.stage[stage], &k_map, &shared.full[stage], 0, token, group, page);
          tma_load(shared.stage[stage] + kHalfBytes, &k_map, &shared.full[stage], 64, token, group,
                   page);
        }
        close();
        open(kTileBytes);
        if (lane == 0) {
          tma_load(shared.stage[stage], &v_map, &shared.full[stage], 0, token, group, page);
          tma_load(shared.stage[stage] + kHalfBytes, &v_map, &shared.full[stage], 64, token, group,
                   page);
        }
        close();
        __syncwarp();
      }
    }
    // First maxima and sums of all slots, then the partial results of one slot after another:
    // neighbouring queries lie side by side, a copy per run of queries that have it.
    const int pairs = lane < kQueries ? work.pairs[lane] : 0, num_partials = work.num_partials;
    const int64_t partial0 = work.partial0;
    mbarrier_arrive(&shared.plan_empty[buffer]);
    if (num_partials > 0) {
      const uint32_t bytes = num_partials * kQueries * kHeads * sizeof(float2);
      open(bytes);
      if (lane == 0)
        bulk_load(shared.stage[stage], p.ws.partial_ml + partial0 * kHeads, bytes,
                  &shared.full[stage]);
      close();
      __syncwarp();
    }
    for (int slot = 0; slot < num_partials; ++slot) {
      const uint32_t queries = __ballot_sync(0xffffffffu, slot < pairs);
      open(__popc(queries) * kPartialBytes);
      __syncwarp();
      if ((queries & ~(queries << 1)) >> lane & 1) {
        const int run = __ffs(~(queries >> lane)) - 1;
        bulk_load(shared.stage[stage] + lane * kPartialBytes,
                  p.ws.partial_o + (partial0 + slot * kQueries + lane) * 256, run * kPartialBytes,
                  &shared.full[stage]);
      }
      close();
      __syncwarp();
    }
  }
}

// Writes O and LSE of one warp's query (16 rows of 128 channels) and reports non-finite rows.
__device__ __forceinline__ void write_query(const Params& p, const TileWork& work, int query,
                                            const float (&o)[64], const RowState& state, int lane) {
  const int row = work.rows.row0 + query;
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
        const float x = o[4 * (j + i) + 2 * half] * inverse,
                    y = o[4 * (j + i) + 2 * half + 1] * inverse;
        finite += (x - x) + (y - y);
        w[i] = pack_bf16x2(x, y);
      }
      const bool odd = lane & 1, high = lane & 2;
      const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1);
      const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
      const uint32_t even0 = odd ? a : w[0], even1 = odd ? w[1] : a;
      const uint32_t even2 = odd ? b : w[2], even3 = odd ? w[3] : b;
      const uint32_t c = __shfl_xor_sync(0xffffffffu, high ? even0 : even2, 2);
      const uint32_t d = __shfl_xor_sync(0xffffffffu, high ? even1 : even3, 2);
      const uint4 piece = high ? make_uint4(c, d, even2, even3) : make_uint4(even0, even1, c, d);
      *reinterpret_cast<uint4*>(out + 8 * (j + lane % 4)) = piece;
    }
  }
  if (__any_sync(0xffffffffu, finite != 0.0f) && lane == 0) {
    p.ws.repair[atomicAdd(&p.ws.counters[AttendWorkspace::kRepairs], 1)] = {row, work.group};
  }
}

// Writes this warp's piece of a split query. True in the warp that is the query's last: then o and
// state have become the sum of all pieces, in the order of the list.
__device__ __forceinline__ bool join_pieces(const Params& p, const TileWork& work, int query,
                                            float (&o)[64], RowState& state, int lane) {
  const int piece = (work.unit + static_cast<int>(blockIdx.x)) * kQueries + query;
  store_partial(p.ws.piece_o, p.ws.piece_ml, piece, o, state.maximum, state.sum, lane);
  __threadfence();
  __syncwarp();
  int done = 0;
  if (lane == 0)
    done = atomicAdd(&p.ws.parts_done[work.unit * kQueries + query], work.parts) + work.parts;
  if (__shfl_sync(0xffffffffu, done, 0) < kAttendTileParts) return false;
  __threadfence();

  // All maxima are on their way together, and each piece while the one before is added.
  constexpr int kMost = kAttendTileParts / 2 + 1;  // pieces of a unit
  const int64_t first = int64_t{work.unit + work.ctas[0]} * kQueries + query;
  const int count = work.ctas[1] - work.ctas[0] + 1;
  float2 ml[kMost][2];
  float weight[kMost][2];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2* from = p.ws.piece_ml + (first + i * kQueries) * kHeads + lane / 4 + 8 * row;
      ml[i][row] = i < count ? __ldcg(from) : make_float2(-INFINITY, 0);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kMost; ++i) top = fmaxf(top, ml[i][row].x);
    state.maximum[row] = top;
    state.sum[row] = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {  // -inf: no block of the piece was the query's
      weight[i][row] =
          ml[i][row].x == -INFINITY ? 0.0f : exp2_approx((ml[i][row].x - top) * p.scale_log2);
      if (lane % 4 == 0) state.sum[row] = fmaf(ml[i][row].y, weight[i][row], state.sum[row]);
    }
  }
#pragma unroll
  for (int j = 0; j < 64; ++j) o[j] = 0;
  uint4 next[8];
  const auto fetch = [&](int i) {
#pragma unroll
    for (int word = 0; word < 8; ++word)
      next[word] = __ldcg(p.ws.piece_o + (first + i * kQueries) * 256 + word * 32 + lane);
  };
  fetch(0);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= count) break;
    uint4 words[8];
#pragma unroll
    for (int word = 0; word < 8; ++word) words[word] = next[word];
    if (i + 1 < count) fetch(i + 1);
    add_partial(o, [&](int word) { return words[word]; }, weight[i]);
  }
  return true;
}

// Values behind the sequence's end become zeros: their weights are 0, but 0 x NaN is not. Both
// warpgroups do it for themselves and write the same. Only the lanes that later give the stage back
// write, so that racecheck can follow the hand-over; at most 16 tiles of a sequence have a tail.
__device__ __forceinline__ void clear_tail(char* values, int tail, int consumer) {
  if (threadIdx.x % 32 == 0) {
    for (int i = threadIdx.x / 32 % 4; i < (kBlock - tail) * 16; i += 4) {
      const int row = tail + i / 16, half = i / 8 % 2;
      *reinterpret_cast<uint4*>(values + half * kHalfBytes + row * 128 + i % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
  }
  named_barrier_sync(1 + consumer, 128);
}

template <int kTopk, bool kSplit>
__device__ __forceinline__ void consume(const Params& p, Shared<kTopk>& shared, int consumer,
                                        int warp, int lane) {
  const int query = consumer * 4 + warp % 4;  // of the tile
  const uint64_t query_rows = descriptor_k_major(shared.query + consumer * 64 * 128);
  const uint64_t stage_keys = descriptor_k_major(shared.stage[0]);
  const uint64_t stage_values = descriptor_mn_major(shared.stage[0], kHalfBytes);
  const auto wait_full = [&](RingPlace at) { mbarrier_wait(&shared.full[at.stage], at.parity); };
  const auto release = [&](RingPlace at) {
    if (lane == 0) mbarrier_arrive(&shared.empty[at.stage]);
  };
  const auto tile_of = [](uint64_t descriptor, RingPlace at) {
    return descriptor_advance(descriptor, at.stage * kTileBytes);
  };

  RingPlace cursor;                   // the next stage of the ring
  const auto skip = [&](int count) {  // entries, of two stages each
    for (int i = 0; i < 2 * count; ++i) {
      wait_full(cursor);
      release(cursor);
      cursor.advance();
    }
  };
  const auto take = [&] {
    const RingPlace place = cursor;
    cursor.advance();
    return place;
  };

  for (int round = 0;; ++round) {
    const int buffer = round % kBuffers;
    mbarrier_wait(&shared.plan_full[buffer], round / kBuffers & 1);
    const TileWork& work = shared.work[buffer];
    if (__shfl_sync(0xffffffffu, work.group, 0) < 0) return;
    const int num_wanted = __shfl_sync(0xffffffffu, work.num_wanted[consumer], 0);
    mbarrier_wait(&shared.query_full, round & 1);

    RowState state;
    float o[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) o[j] = 0;
    uint32_t weights[8][4];
    float s[64], old[2];
    int index = 0;      // of the next block
    uint32_t word = 0;  // the block at work
    uint32_t ahead = wanted_block<kTopk, kSplit>(shared, buffer, consumer, 0, num_wanted);
    RingPlace keys, values;  // of the block at work
    const auto take_next = [&] {
      word = __shfl_sync(0xffffffffu, ahead, 0);
      ahead = wanted_block<kTopk, kSplit>(shared, buffer, consumer, ++index, num_wanted);
      skip(static_cast<int>(word >> kSkipShift));
      keys = take();
    };
    const auto wanted = [&] { return (word >> warp % 4 & 1) != 0; };  // by this warp's query
    const auto rescale = [&] {
#pragma unroll
      for (int j = 0; j < 64; ++j) o[j] *= old[j / 2 % 2];
    };
    const auto pack = [&] { pack_weights(s, weights, wanted() ? 0xffffffffu : 0u); };

    while (index < num_wanted) {
      take_next();
      values = take();
      wait_full(keys);
      issue_qk<kHalfQueryBytes>(s, query_rows, tile_of(stage_keys, keys));
      wgmma_wait<0>();
      wgmma_pin(s);
      release(keys);
      // The only block that a row may see in part, or that may be incomplete.
      if (word & kWantedOwn) {
        const int tail = work.tail;
        if (tail < kBlock) {
          wait_full(values);
          clear_tail(shared.stage[values.stage], tail, consumer);
        }
        const int limit = work.rows.position0 % kBlock + query;  // last visible column
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          if (8 * (j / 4) + 2 * (lane % 4) + j % 2 > limit) s[j] = -INFINITY;
        }
      }
      if (wanted() && softmax_step<true>(s, state, old, p.scale_log2)) rescale();
      pack();
      while ((word & kRunEnd) == 0) {
        const RingPlace last = values;
        take_next();  // here: control flow while products run would make ptxas serialise them
        values = take();
        wait_full(last);
        wait_full(keys);
        issue_qk<kHalfQueryBytes>(s, query_rows, tile_of(stage_keys, keys));
        issue_pv<true>(o, weights, tile_of(stage_values, last));
        wgmma_wait<1>();
        wgmma_pin(s);
        release(keys);
        const bool moved = wanted() && softmax_step<false>(s, state, old, p.scale_log2);
        wgmma_wait<0>();
        wgmma_pin(o);
        release(last);
        if (moved) rescale();
        pack();
      }
      if (index == num_wanted && lane == 0) mbarrier_arrive(&shared.query_empty);
      wait_full(values);
      issue_pv<true>(o, weights, tile_of(stage_values, values));
      wgmma_wait<0>();
      wgmma_pin(o);
      release(values);
    }
    if constexpr (kTopk > 0) skip(__shfl_sync(0xffffffffu, work.num_behind[consumer], 0));
    if (num_wanted == 0 && lane == 0) mbarrier_arrive(&shared.query_empty);

    if constexpr (kTopk > 0 && !kSplit) {
      const int num_partials = work.num_partials, pairs = work.pairs[query];
      if (num_partials > 0) {
        constexpr int kPerLane = kTopk / 4;
        float weight[kPerLane][2];
        const auto pass = [&] {
          __syncwarp();
          release(cursor);
          cursor.advance();
        };
        wait_full(cursor);
        if (pairs > 0) {
          const float2* ml = reinterpret_cast<const float2*>(shared.stage[cursor.stage]) +
                             query * kHeads + lane / 4;
          weigh_partials<kPerLane>(weight, ml, pairs, o, state, p.scale_log2, lane);
        }
        pass();
#pragma unroll 1
        for (int slot = 0; slot < num_partials; ++slot) {
          wait_full(cursor);
          if (slot < pairs) {
            float mine[2] = {weight[0][0], weight[0][1]};
#pragma unroll
            for (int i = 1; i < kPerLane; ++i) {
              if (slot / 4 == i) mine[0] = weight[i][0], mine[1] = weight[i][1];
            }
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              mine[row] = __shfl_sync(0xffffffffu, mine[row], lane / 4 * 4 + slot % 4);
            }
            const char* partial = shared.stage[cursor.stage] + query * kPartialBytes;
            const uint4* from = reinterpret_cast<const uint4*>(partial) + lane;
            add_partial(o, [&](int word) { return from[word * 32]; }, mine);
          }
          pass();
        }
      }
    }
    const int row = work.rows.row0 + query;
    const bool live = row >= work.rows.begin && row < work.rows.end;
    bool complete = live;
    if constexpr (kSplit) {
      if (live && work.parts < kAttendTileParts)
        complete = join_pieces(p, work, query, o, state, lane);
    }
    if (complete) write_query(p, work, query, o, state, lane);
    mbarrier_arrive(&shared.plan_empty[buffer]);
  }
}

template <int kTopk, bool kSplit>
__global__ void __launch_bounds__(kThreads, 1)
    attend_tile_kernel(const __grid_constant__ CUtensorMap query_map,
                       const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map,
                       const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  Shared<kTopk>& shared = *reinterpret_cast<Shared<kTopk>*>(smem);
  const int tid = threadIdx.x;
  if (tid == 0) {
    if (smem_address(smem) % 1024 != 0) __trap();  // no static shared memory lies before it
    mbarrier_init(&shared.query_full, 1);
    mbarrier_init(&shared.query_empty, kConsumerWarps);
    for (int i = 0; i < kBuffers; ++i) {  // every lane arrives: plans are ordinary memory
      mbarrier_init(&shared.plan_full[i], 32);
      mbarrier_init(&shared.plan_empty[i], 32 * (kConsumerWarps + 2));
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  if (tid < 128) {  // 128 x 56 + 256 x 224 registers: as many as the launch gives, 384 x 168
    registers_decrease<56>();
    if (tid < 32) {
      load_tiles<kTopk, kSplit>(p, k_map, v_map, shared, tid);
    } else if (tid < 64) {
      plan_tiles<kTopk, kSplit>(p, shared, tid - 32);
    } else if (tid < 96) {
      load_queries<kTopk>(query_map, shared);
    }
  } else {
    registers_increase<224>();
    consume<kTopk, kSplit>(p, shared, tid / 128 - 1, tid / 32, tid % 32);
  }
}

template <int kTopk, bool kSplit>
void launch(const AttendCudaArgs& a, int threshold, int chunk, const AttendSizes& sizes,
            const AttendWorkspace& ws, cudaStream_t stream) {
  Params p;
  p.batch = a.batch;
  p.ids_RTK = a.lists;
  p.o_THD = static_cast<__nv_bfloat16*>(a.o_THD);
  p.lse_TH = a.lse_TH;
  p.groups = a.geometry.groups;
  p.position = threshold > 1 ? ws.position : nullptr;
  p.chunk = chunk;
  p.chunk_tiles = sizes.chunk_tiles;
  p.scale_log2 = static_cast<float>(a.geometry.logit_scale()) * kLog2e;
  p.ws = ws;
  const auto kernel = attend_tile_kernel<kTopk, kSplit>;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     sizeof(Shared<kTopk>)));
  const int ctas = kSplit ? std::min(sm_count(), kAttendMaxSms) : sm_count();
  launch_dependent(kernel, ctas, kThreads, sizeof(Shared<kTopk>), stream, query_map(a, kQueries),
                   kv_map(a, a.k), kv_map(a, a.v), p);
}

template <bool kSplit>
void attend_tiles(const AttendCudaArgs& args, int threshold, int chunk, const AttendSizes& sizes,
                  const AttendWorkspace& ws, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (args.support.kind == AttendSupport::Kind::kFull)
    return launch<0, kSplit>(args, threshold, chunk, sizes, ws, handle);
  switch (args.geometry.topk) {
    case 4:
      return launch<4, kSplit>(args, threshold, chunk, sizes, ws, handle);
    case 16:
      return launch<16, kSplit>(args, threshold, chunk, sizes, ws, handle);
    default:
      M3_FAIL("attend: the Hopper path has topk 4 and 16, got {}", args.geometry.topk);
  }
}

}  // namespace

void attend_sm90(const AttendCudaArgs& args, int threshold, bool split, Stream stream) {
  const AttendSizes sizes = attend_sizes(args.geometry, args.batch, threshold, split);
  M3_CHECK(!split || (threshold == 1 && sizes.max_tiles * args.geometry.groups <= sizes.split_units),
           "attend: {} tiles x {} groups with threshold {} cannot be split, want at most {} of them "
           "and threshold 1",
           sizes.max_tiles, args.geometry.groups, threshold, kAttendMaxSplitUnits);
  const AttendWorkspace ws =
      attend_make_workspace(args.geometry, args.batch, threshold, split, args.workspace);
  attend_plan_pairs(args, threshold, sizes, ws, stream);
  for (int chunk = 0; chunk < sizes.num_chunks; ++chunk) {
    if (threshold > 1) attend_rows(args, chunk, sizes, ws, stream);
    const auto tiles = split ? attend_tiles<true> : attend_tiles<false>;
    tiles(args, threshold, chunk, sizes, ws, stream);
  }
  attend_repair(args, ws.repair, ws.counters + AttendWorkspace::kRepairs, stream);
}

}  // namespace m3
