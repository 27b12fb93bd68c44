#include "model/attention_block.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ops/cache_append/cache_append.h"
#include "ops/qknorm_rope/qknorm_rope.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

namespace {

int index_rotary_dim(const TextConfig& config) { return std::min(config.rotary_dim, config.index_dim); }

bool has_index(const TextConfig& config, AttentionMode mode, bool teach_index) {
  return (uses_index(mode) || teach_index) && config.num_sparse_layers() > 0;
}

int64_t visible_budget(const TextConfig& config) { return int64_t{config.topk_blocks} * config.block_size; }

AttendSupport sparse_support(const TextConfig& config, AttentionMode mode) {
  switch (mode) {
    case AttentionMode::kMsa: return AttendSupport::blocks();
    case AttentionMode::kFull: return AttendSupport::full();
    case AttentionMode::kWindow: {
      // One block of first tokens (attention sinks) and a window; together MSA's budget (msa.md §16).
      const int64_t sink = config.topk_blocks > 1 ? config.block_size : 0;
      return AttendSupport::sliding(visible_budget(config) - sink, sink);
    }
    case AttentionMode::kDsa: return AttendSupport::tokens(visible_budget(config));
  }
  M3_FAIL("unknown attention mode {}", static_cast<int>(mode));
}

// The tensors of a step, for planning and for counting alike.
void alloc_step_tensors(const TextConfig& config, int64_t num_tokens, AttentionMode mode, bool index, Arena& arena,
                        AttentionStep& step) {
  step.cos_TM = arena.alloc("rope cos", DType::kF32, {num_tokens, config.rotary_dim / 2});
  step.sin_TM = arena.alloc("rope sin", DType::kF32, {num_tokens, config.rotary_dim / 2});
  step.index_cos_TM = step.cos_TM;
  step.index_sin_TM = step.sin_TM;
  if (!index) return;
  if (const int rotary = index_rotary_dim(config); rotary != config.rotary_dim) {
    step.index_cos_TM = arena.alloc("index rope cos", DType::kF32, {num_tokens, rotary / 2});
    step.index_sin_TM = arena.alloc("index rope sin", DType::kF32, {num_tokens, rotary / 2});
  }
  if (mode == AttentionMode::kDsa) {
    step.dsa_weights_TR = arena.alloc("dsa weights", DType::kF32, {num_tokens, config.num_kv_heads});
  }
}

Tensor positions_of(const MsaBatch& batch, std::vector<int32_t>& storage) {
  storage.resize(batch.num_queries);
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t i = 0; i < batch.q_len(n); ++i) {
      storage[batch.q_begin(n) + i] = static_cast<int32_t>(std::max<int64_t>(0, batch.first_position(n) + i));
    }
  }
  return Tensor(storage.data(), DType::kI32, {batch.num_queries});
}

}  // namespace

const char* attention_mode_name(AttentionMode mode) {
  static constexpr std::array<const char*, 4> kNames = {"msa", "full", "window", "dsa"};
  return kNames[static_cast<size_t>(mode)];
}

bool uses_index(AttentionMode mode) { return mode == AttentionMode::kMsa || mode == AttentionMode::kDsa; }

MsaGeometry msa_geometry(const TextConfig& config) {
  MsaGeometry geometry;
  geometry.groups = config.num_kv_heads;
  geometry.heads_per_group = config.heads_per_group();
  geometry.head_dim = config.head_dim;
  geometry.index_dim = config.index_dim;
  geometry.block = config.block_size;
  geometry.topk = config.topk_blocks;
  geometry.local = config.local_blocks;
  geometry.init = config.init_blocks;
  return geometry;
}

int64_t attention_step_bytes(const TextConfig& config, int64_t num_tokens, AttentionMode mode, bool teach_index) {
  Arena measuring = Arena::measuring("attention step");
  AttentionStep unused;
  alloc_step_tensors(config, num_tokens, mode, has_index(config, mode, teach_index), measuring, unused);
  return measuring.peak_bytes();
}

AttentionStep plan_attention(const TextConfig& config, const MsaBatch& batch, AttentionMode mode, DType dtype,
                             Arena& arena, Stream stream, bool teach_index) {
  const MsaGeometry geometry = msa_geometry(config);
  AttentionStep step;
  step.batch = batch;
  step.mode = mode;
  step.index = has_index(config, mode, teach_index);
  alloc_step_tensors(config, batch.num_queries, mode, step.index, arena, step);

  std::vector<int32_t> storage;
  const Tensor pos_T = positions_of(batch, storage);
  rope_angles(pos_T, config.rope_theta, step.cos_TM, step.sin_TM, stream);
  if (step.index_cos_TM.data() != step.cos_TM.data()) {
    rope_angles(pos_T, config.rope_theta, step.index_cos_TM, step.index_sin_TM, stream);
  }

  AttendOptions options;
  options.compute = dtype == DType::kBF16 ? MsaCompute::kBF16 : MsaCompute::kF32;
  if (config.num_sparse_layers() > 0) {
    options.support = sparse_support(config, mode);
    step.sparse = attend_plan(geometry, batch, options);
    step.workspace_bytes = std::max(step.workspace_bytes, step.sparse.workspace_bytes);
    if (mode == AttentionMode::kMsa) {
      step.select = index_select_plan(geometry, batch, {});
      step.workspace_bytes = std::max(step.workspace_bytes, step.select.workspace_bytes);
    } else if (mode == AttentionMode::kDsa) {
      const DsaGeometry dsa = {config.num_kv_heads, config.index_dim, config.block_size, visible_budget(config)};
      step.dsa_select = dsa_select_plan(dsa, batch);
      step.workspace_bytes = std::max(step.workspace_bytes, step.dsa_select.workspace_bytes);
      float* weights = step.dsa_weights_TR.ptr<float>();
      std::fill(weights, weights + step.dsa_weights_TR.numel(), 1.0f);
    }
  }
  if (config.num_sparse_layers() < config.num_layers) {
    options.support = AttendSupport::full();
    step.full = attend_plan(geometry, batch, options);
    step.workspace_bytes = std::max(step.workspace_bytes, step.full.workspace_bytes);
  }
  return step;
}

AttentionActs alloc_attention_acts(const TextConfig& config, int64_t num_tokens, DType dtype, AttentionMode mode,
                                   bool sparse, Keep keep, Arena& arena, bool teach_index) {
  const int64_t T = num_tokens, H = config.num_heads, R = config.num_kv_heads, D = config.head_dim,
                X = config.index_dim;
  AttentionActs acts;
  acts.h_TC = arena.alloc("attention input", dtype, {T, config.hidden_size});
  acts.q_THD = arena.alloc("q", dtype, {T, H, D});
  acts.k_TRD = arena.alloc("k", dtype, {T, R, D});
  acts.v_TRD = arena.alloc("v", dtype, {T, R, D});
  acts.o_THD = arena.alloc("attention output", dtype, {T, H, D});
  const bool index = sparse && (uses_index(mode) || teach_index);
  if (index) {
    acts.qi_TRX = arena.alloc("index q", dtype, {T, R, X});
    acts.ki_TX = arena.alloc("index k", dtype, {T, X});
  }
  if (sparse && uses_index(mode)) {
    acts.lists = mode == AttentionMode::kMsa
                     ? arena.alloc("block ids", DType::kI32, {R, T, config.topk_blocks})
                     : arena.alloc("token ids", DType::kI32, {T, visible_budget(config)});
  }
  if (keep == Keep::kNothing && dtype == DType::kF32) {
    acts.q_raw_THD = acts.q_THD;
    acts.k_raw_TRD = acts.k_TRD;
    acts.qi_raw_TRX = acts.qi_TRX;
    acts.ki_raw_TX = acts.ki_TX;
    return acts;
  }
  // f32, so that q and k are rounded once, after norm and RoPE (model.md §4.2).
  const DType raw = keep == Keep::kNothing ? DType::kF32 : dtype;
  acts.q_raw_THD = arena.alloc("q before norm", raw, {T, H, D});
  acts.k_raw_TRD = arena.alloc("k before norm", raw, {T, R, D});
  if (index) {
    acts.qi_raw_TRX = arena.alloc("index q before norm", raw, {T, R, X});
    acts.ki_raw_TX = arena.alloc("index k before norm", raw, {T, X});
  }
  if (keep == Keep::kNothing) return acts;
  acts.lse_TH = arena.alloc("lse", DType::kF32, {T, H});
  return acts;
}

int64_t attention_scratch_bytes(const TextConfig& config, int64_t num_tokens, const AttentionStep& step) {
  const int64_t q_width = int64_t{config.num_heads} * config.head_dim;
  return std::max({step.workspace_bytes, gemm_scratch_bytes(num_tokens, q_width, config.hidden_size),
                   gemm_scratch_bytes(num_tokens, config.hidden_size, q_width)}) +
         2 * Arena::kAlignment;
}

namespace {

// Keys, values and index keys of all new tokens; queries and index queries of those that attend.
enum Part : unsigned { kKeys = 1, kQueries = 2, kBoth = 3 };

// acts.h to projections, per-head norm and RoPE.
void project(const TextConfig& config, const AttentionWeights& w, bool index, unsigned parts, const AttentionStep& step,
             const AttentionActs& acts, const GemmOptions& options, Arena& scratch, Stream stream) {
  const float eps = config.rms_norm_eps;
  auto flat = [](const Tensor& t) { return t.reshape({t.dim(0), t.dim(1) * t.dim(2)}); };
  std::vector<GemmOutput> outputs;
  if (parts & kQueries) outputs.push_back({w.q, {}, flat(acts.q_raw_THD)});
  if (parts & kKeys) {
    outputs.push_back({w.k, {}, flat(acts.k_raw_TRD)});
    outputs.push_back({w.v, {}, flat(acts.v_TRD)});
  }
  if (index && (parts & kQueries)) outputs.push_back({w.index_q, {}, flat(acts.qi_raw_TRX)});
  if (index && (parts & kKeys)) outputs.push_back({w.index_k, {}, acts.ki_raw_TX});
  gemm_shared_input(acts.h_TC, outputs, options, scratch, stream);

  if (parts & kQueries) {
    qknorm_rope(acts.q_raw_THD, w.q_norm_D, step.cos_TM, step.sin_TM, eps, acts.q_THD, stream);
    if (index) {
      qknorm_rope(acts.qi_raw_TRX, w.index_q_norm_X, step.index_cos_TM, step.index_sin_TM, eps, acts.qi_TRX, stream);
    }
  }
  if (parts & kKeys) {
    qknorm_rope(acts.k_raw_TRD, w.k_norm_D, step.cos_TM, step.sin_TM, eps, acts.k_TRD, stream);
    if (index) {
      const Shape one_head = {acts.ki_TX.dim(0), 1, config.index_dim};
      qknorm_rope(acts.ki_raw_TX.reshape(one_head), w.index_k_norm_X, step.index_cos_TM, step.index_sin_TM, eps,
                  acts.ki_TX.reshape(one_head), stream);
    }
  }
}

// What the queries read: the pages of the cache after the new tokens are appended, or the new tokens themselves.
struct Keys {
  Tensor k, v, ki;
};

Keys append_keys(const AttentionStep& step, bool index, const KvLayer* cache, const AttentionActs& acts,
                 Stream stream) {
  if (cache == nullptr) return {acts.k_TRD, acts.v_TRD, acts.ki_TX};
  cache_append(step.batch, acts.k_TRD, acts.v_TRD, index ? acts.ki_TX : Tensor(), cache->k_PRBD, cache->v_PRBD,
               index ? cache->x_PBX : Tensor(), stream);
  return {cache->k_PRBD, cache->v_PRBD, cache->x_PBX};
}

// Block ids or token lists of the layer, or nothing where its support needs none.
Tensor select_keys(const AttentionStep& step, const AttentionActs& acts, const Tensor& ki, Arena& scratch,
                   Stream stream) {
  if (!uses_index(step.mode) || acts.lists_chosen) return acts.lists;
  ArenaScope scope(scratch);
  void* workspace = scratch.alloc_bytes("selection workspace", step.workspace_bytes);
  if (step.mode == AttentionMode::kMsa) {
    index_select(step.select, step.batch, acts.qi_TRX, ki, acts.lists, {}, workspace, stream);
  } else {
    dsa_select(step.dsa_select, step.batch, acts.qi_TRX, ki, step.dsa_weights_TR, acts.lists, workspace, stream);
  }
  return acts.lists;
}

// x += W_o attend(q, keys)
void attend_rows(const AttentionWeights& w, bool sparse, bool index, const AttentionStep& step, const Keys& keys,
                 const GemmOptions& options, const AttentionActs& acts, const Tensor& x_TC, Arena& scratch,
                 Stream stream) {
  const Tensor lists = index ? select_keys(step, acts, keys.ki, scratch, stream) : Tensor();
  {
    ArenaScope scope(scratch);
    void* workspace = scratch.alloc_bytes("attention workspace", step.workspace_bytes);
    attend(sparse ? step.sparse : step.full, step.batch, acts.q_THD, keys.k, keys.v, lists, acts.o_THD, acts.lse_TH,
           workspace, stream);
  }
  GemmOptions add = options;
  add.accumulate = true;
  const Tensor& o = acts.o_THD;
  gemm(o.reshape({o.dim(0), o.dim(1) * o.dim(2)}), w.o, {}, x_TC, add, scratch, stream);
}

}  // namespace

void attention_forward(const TextConfig& config, const AttentionWeights& weights, bool sparse,
                       const AttentionStep& step, const KvLayer* cache, const GemmOptions& gemm_options,
                       const AttentionActs& acts, const Tensor& x_TC, Arena& scratch, Stream stream) {
  const bool index = sparse && step.index;
  rmsnorm(x_TC, weights.norm_C, acts.h_TC, config.rms_norm_eps, stream);
  project(config, weights, index, kBoth, step, acts, gemm_options, scratch, stream);
  const Keys keys = append_keys(step, index, cache, acts, stream);
  attend_rows(weights, sparse, index, step, keys, gemm_options, acts, x_TC, scratch, stream);
}

void attention_forward_last(const TextConfig& config, const AttentionWeights& weights, bool sparse,
                            const AttentionStep& step, const AttentionStep& tail, const KvLayer& cache,
                            const GemmOptions& gemm_options, const AttentionActs& acts,
                            const AttentionActs& tail_acts, const Tensor& x_TC, const Tensor& x_LC, Arena& scratch,
                            Stream stream) {
  const bool index = sparse && step.index;
  rmsnorm(x_TC, weights.norm_C, acts.h_TC, config.rms_norm_eps, stream);
  project(config, weights, index, kKeys, step, acts, gemm_options, scratch, stream);
  const Keys keys = append_keys(step, index, &cache, acts, stream);
  if (x_LC.dim(0) == 0) return;
  rmsnorm(x_LC, weights.norm_C, tail_acts.h_TC, config.rms_norm_eps, stream);
  project(config, weights, index, kQueries, tail, tail_acts, gemm_options, scratch, stream);
  attend_rows(weights, sparse, index, tail, keys, gemm_options, tail_acts, x_LC, scratch, stream);
}

}  // namespace m3
