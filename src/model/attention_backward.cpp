#include "model/attention_backward.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/qknorm_rope/qknorm_rope.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace m3 {

namespace {

Tensor flat(const Tensor& t) {
  return t.reshape({t.dim(0), t.numel() / std::max<int64_t>(t.dim(0), 1)});
}
Tensor one_head(const Tensor& t) {
  return t.reshape({t.dim(0), 1, t.dim(1)});
}

// What the backward of the main branch carves from its scratch, for running and for counting alike.
struct MainGradients {
  Tensor dy_TC;                           // dx in the type of products
  Tensor do_THD, dq_THD, dk_TRD, dv_TRD;  // dq and dk become those before norm and RoPE in place
  Tensor dh_TC;
};

MainGradients alloc_main(const TextConfig& config, int64_t num_tokens, DType dtype, Arena& arena) {
  const int64_t T = num_tokens, H = config.num_heads, R = config.num_kv_heads, D = config.head_dim;
  MainGradients g;
  if (dtype != DType::kF32) g.dy_TC = arena.alloc("dx, rounded", dtype, {T, config.hidden_size});
  g.do_THD = arena.alloc("do", dtype, {T, H, D});
  g.dq_THD = arena.alloc("dq", dtype, {T, H, D});
  g.dk_TRD = arena.alloc("dk", dtype, {T, R, D});
  g.dv_TRD = arena.alloc("dv", dtype, {T, R, D});
  g.dh_TC = arena.alloc("dh", DType::kF32, {T, config.hidden_size});
  return g;
}

struct IndexGradients {
  Tensor dqi_TRX, dki_TX;
  Tensor kl_RT;
};

IndexGradients alloc_index(const TextConfig& config, int64_t num_tokens, DType dtype,
                           Arena& arena) {
  const int64_t T = num_tokens, R = config.num_kv_heads, X = config.index_dim;
  IndexGradients g;
  g.dqi_TRX = arena.alloc("dqi", dtype, {T, R, X});
  g.dki_TX = arena.alloc("dki", dtype, {T, X});
  g.kl_RT = arena.alloc("kl", DType::kF32, {R, T});
  return g;
}

}  // namespace

AttentionBackwardStep plan_attention_backward(const TextConfig& config, const AttentionStep& step,
                                              std::span<const uint8_t> kl_documents,
                                              double query_weight) {
  const MsaGeometry geometry = msa_geometry(config);
  AttentionBackwardStep plans;
  if (config.num_sparse_layers() > 0) {
    plans.sparse = attend_backward_plan(geometry, step.batch, step.sparse.options.support);
    plans.workspace_bytes = plans.sparse.workspace_bytes;
    plans.has_kl = !kl_documents.empty();
    if (plans.has_kl && step.mode == AttentionMode::kDsa) {
      plans.dsa_kl = dsa_kl_plan(geometry, geometry.groups, step.sparse.options.support.budget,
                                 step.batch, kl_documents);
      plans.kl_weight = query_weight;
      plans.workspace_bytes = std::max(plans.workspace_bytes, plans.dsa_kl.workspace_bytes);
    } else if (plans.has_kl) {
      plans.kl = index_kl_plan(geometry, step.batch, step.sparse.options.support, kl_documents);
      plans.kl_weight = query_weight / geometry.groups;
      plans.workspace_bytes = std::max(plans.workspace_bytes, plans.kl.workspace_bytes);
    }
  }
  if (config.num_sparse_layers() < config.num_layers) {
    plans.full = attend_backward_plan(geometry, step.batch, AttendSupport::full());
    plans.workspace_bytes = std::max(plans.workspace_bytes, plans.full.workspace_bytes);
  }
  return plans;
}

int64_t attention_backward_scratch_bytes(const TextConfig& config, int64_t num_tokens, DType dtype,
                                         const AttentionBackwardStep& plans) {
  const int64_t T = num_tokens, C = config.hidden_size,
                q_width = int64_t{config.num_heads} * config.head_dim;
  Arena measuring = Arena::measuring("attention backward");
  alloc_main(config, T, dtype, measuring);
  alloc_index(config, T, dtype, measuring);
  return measuring.peak_bytes() + 2 * Arena::kAlignment +
         std::max({plans.workspace_bytes, gemm_scratch_bytes(T, q_width, C),
                   gemm_scratch_bytes(T, C, q_width),
                   qknorm_rope_backward_scratch_bytes(T, config.head_dim),
                   qknorm_rope_backward_scratch_bytes(T, config.index_dim),
                   rmsnorm_backward_scratch_bytes(T, C)});
}

double index_loss(const TextConfig& config, const AttentionWeights& w, const AttentionStep& step,
                  const AttentionBackwardStep& plans, const GemmOptions& gemm_options,
                  const AttentionActs& acts, const Tensor& dh_TC, const AttentionWeights& gradients,
                  Arena& scratch, Stream stream) {
  ArenaScope scope(scratch);
  IndexGradients g = alloc_index(config, acts.h_TC.dim(0), acts.h_TC.dtype(), scratch);
  {
    ArenaScope workspace_scope(scratch);
    void* workspace = scratch.alloc_bytes("KL workspace", plans.workspace_bytes);
    if (step.mode == AttentionMode::kDsa) {
      g.kl_RT = g.kl_RT[0];  // one row per query
      dsa_kl(plans.dsa_kl, step.batch, plans.kl_weight,
             {acts.q_THD, acts.k_TRD, acts.lse_TH, acts.qi_TRX, acts.ki_TX, step.dsa_weights_TR,
              acts.lists},
             {g.dqi_TRX, g.dki_TX, {}, g.kl_RT}, workspace);
    } else {
      index_kl(plans.kl, step.batch, plans.kl_weight,
               {acts.q_THD, acts.k_TRD, acts.lse_TH, acts.qi_TRX, acts.ki_TX, acts.lists},
               {g.dqi_TRX, g.dki_TX, g.kl_RT, {}}, workspace);
    }
  }
  const float eps = config.rms_norm_eps;
  qknorm_rope_backward(acts.qi_raw_TRX, w.index_q_norm_X, step.index_cos_TM, step.index_sin_TM, eps,
                       g.dqi_TRX, g.dqi_TRX, gradients.index_q_norm_X, scratch, stream);
  qknorm_rope_backward(one_head(acts.ki_raw_TX), w.index_k_norm_X, step.index_cos_TM,
                       step.index_sin_TM, eps, one_head(g.dki_TX), one_head(g.dki_TX),
                       gradients.index_k_norm_X, scratch, stream);
  GemmOptions add = gemm_options;
  add.accumulate = true;
  gemm_backward_w(flat(g.dqi_TRX), acts.h_TC, gradients.index_q.values, {}, add, scratch, stream);
  gemm_backward_w(g.dki_TX, acts.h_TC, gradients.index_k.values, {}, add, scratch, stream);
  if (dh_TC.defined()) {
    gemm_backward_x(flat(g.dqi_TRX), w.index_q, dh_TC, add, scratch, stream);
    gemm_backward_x(g.dki_TX, w.index_k, dh_TC, add, scratch, stream);
  }
  double sum = 0;
  const float* rows = g.kl_RT.ptr<float>();
  for (int64_t i = 0; i < g.kl_RT.numel(); ++i) sum += rows[i];
  return sum;
}

void attention_backward(const TextConfig& config, const AttentionWeights& w, bool sparse,
                        const AttentionStep& step, const AttentionBackwardStep& plans,
                        const GemmOptions& gemm_options, const AttentionActs& acts,
                        const Tensor& x_TC, const Tensor& dx_TC, const Tensor& index_dh_TC,
                        const AttentionWeights& gradients, Arena& scratch, Stream stream) {
  ArenaScope scope(scratch);
  const MainGradients g = alloc_main(config, x_TC.dim(0), acts.h_TC.dtype(), scratch);
  GemmOptions add = gemm_options;
  add.accumulate = true;

  const Tensor& dy_TC = g.dy_TC.defined() ? g.dy_TC : dx_TC;
  if (g.dy_TC.defined()) cast(dx_TC, g.dy_TC, stream);
  gemm_backward_x(dy_TC, w.o, flat(g.do_THD), gemm_options, scratch, stream);
  gemm_backward_w(dy_TC, flat(acts.o_THD), gradients.o.values, {}, add, scratch, stream);
  {
    ArenaScope workspace_scope(scratch);
    void* workspace = scratch.alloc_bytes("attention workspace", plans.workspace_bytes);
    attend_backward(sparse ? plans.sparse : plans.full, step.batch,
                    {acts.q_THD,
                     acts.k_TRD,
                     acts.v_TRD,
                     sparse ? acts.lists : Tensor(),
                     acts.o_THD,
                     acts.lse_TH,
                     g.do_THD,
                     {}},
                    g.dq_THD, g.dk_TRD, g.dv_TRD, workspace);
  }
  const float eps = config.rms_norm_eps;
  qknorm_rope_backward(acts.q_raw_THD, w.q_norm_D, step.cos_TM, step.sin_TM, eps, g.dq_THD,
                       g.dq_THD, gradients.q_norm_D, scratch, stream);
  qknorm_rope_backward(acts.k_raw_TRD, w.k_norm_D, step.cos_TM, step.sin_TM, eps, g.dk_TRD,
                       g.dk_TRD, gradients.k_norm_D, scratch, stream);

  gemm_backward_w(flat(g.dq_THD), acts.h_TC, gradients.q.values, {}, add, scratch, stream);
  gemm_backward_w(flat(g.dk_TRD), acts.h_TC, gradients.k.values, {}, add, scratch, stream);
  gemm_backward_w(flat(g.dv_TRD), acts.h_TC, gradients.v.values, {}, add, scratch, stream);
  gemm_backward_x(flat(g.dq_THD), w.q, g.dh_TC, gemm_options, scratch, stream);
  gemm_backward_x(flat(g.dk_TRD), w.k, g.dh_TC, add, scratch, stream);
  gemm_backward_x(flat(g.dv_TRD), w.v, g.dh_TC, add, scratch, stream);
  if (index_dh_TC.defined()) m3::add(g.dh_TC, index_dh_TC, g.dh_TC, stream);
  rmsnorm_backward(x_TC, w.norm_C, g.dh_TC, eps, dx_TC, true, gradients.norm_C, scratch, stream);
}

}  // namespace m3
