#include "ops/index_select/index_select.h"

#include "ops/common/msa_keys.h"
#include "ops/index_select/index_select_cpu.h"
#include "ops/index_select/index_select_cuda.h"

namespace m3 {

IndexSelectPlan index_select_plan(const MsaGeometry& geometry, const MsaBatch& batch, const IndexSelectOptions& options,
                                  Device device) {
  geometry.check();
  M3_CHECK(geometry.index_dim > 0, "index_select needs an index branch: index_dim is {}", geometry.index_dim);
  IndexSelectPlan plan{.geometry = geometry, .options = options, .device = device, .num_queries = batch.num_queries};
  if (!device.is_cpu()) {
    M3_CHECK(batch.num_queries == 0 || (batch.max_q_len > 0 && batch.max_k_len >= 0),
             "index_select on {}: the batch must carry max_q_len and max_k_len, got {} and {}", device.str(),
             batch.max_q_len, batch.max_k_len);
    plan.workspace_bytes = index_select_cuda_workspace_bytes(geometry, batch);
    return plan;
  }
  batch.check(geometry.block);
  index_select_cpu_plan(plan, batch);
  return plan;
}

void index_select(const IndexSelectPlan& plan, const MsaBatch& batch, const Tensor& qi_TRX, const Tensor& ki,
                  const Tensor& ids_RTK, const Tensor& sel_scores_RTK, void* workspace, Stream stream) {
  const MsaGeometry& g = plan.geometry;
  M3_CHECK(batch.num_queries == plan.num_queries, "index_select: the plan was made for {} query rows, got {}",
           plan.num_queries, batch.num_queries);
  const Shape list_shape{g.groups, plan.num_queries, g.topk};
  msa_check_tensor("qi_TRX", qi_TRX, {plan.num_queries, g.groups, g.index_dim}, plan.device);
  msa_check_float("qi_TRX", qi_TRX);
  msa_check_tensor("ids_RTK", ids_RTK, list_shape, plan.device);
  M3_CHECK(ids_RTK.dtype() == DType::kI32, "ids_RTK holds {}, want i32", dtype_name(ids_RTK.dtype()));
  if (plan.options.sel_scores) {
    msa_check_tensor("sel_scores_RTK", sel_scores_RTK, list_shape, plan.device);
    M3_CHECK(sel_scores_RTK.dtype() == DType::kF32, "sel_scores_RTK holds {}, want f32",
             dtype_name(sel_scores_RTK.dtype()));
  }
  M3_CHECK(workspace != nullptr || plan.workspace_bytes == 0, "index_select: workspace absent, want {} bytes",
           plan.workspace_bytes);
  if (plan.num_queries == 0) return;
  if (!plan.device.is_cpu()) {
    msa_check_float("ki", ki);
    M3_CHECK(ki.device() == plan.device && ki.dim(ki.rank() - 1) == g.index_dim, "ki {} on {}: want [.., {}] on {}",
             ki.shape().str(), ki.device().str(), g.index_dim, plan.device.str());
    M3_CHECK(batch.layout == KvLayout::kPacked || (ki.rank() == 3 && ki.dim(1) == g.block),
             "ki {}: a paged cache is [P, {}, {}], its page is the block", ki.shape().str(), g.block, g.index_dim);
    M3_CHECK(index_select_cuda_workspace_bytes(g, batch) <= plan.workspace_bytes,
             "index_select: the batch's bounds exceed those the plan was made for");
    const IndexSelectPath path = index_select_cuda_path(g, batch, plan.options, qi_TRX.dtype(), ki.dtype());
    index_select_cuda({.geometry = g,
                       .batch = batch,
                       .options = plan.options,
                       .query_dtype = qi_TRX.dtype(),
                       .key_dtype = ki.dtype(),
                       .qi_TRX = qi_TRX.data(),
                       .ki = ki.data(),
                       .num_pages = ki.dim(0),
                       .ids_RTK = static_cast<int32_t*>(ids_RTK.data()),
                       .sel_scores_RTK = plan.options.sel_scores ? static_cast<float*>(sel_scores_RTK.data()) : nullptr,
                       .workspace = workspace},
                      path, stream);
    return;
  }
  index_select_cpu(plan, batch,
                   {.qi_TRX = qi_TRX.data(),
                    .qi_dtype = qi_TRX.dtype(),
                    .ki = &ki,
                    .ids_RTK = static_cast<int32_t*>(ids_RTK.data()),
                    .sel_scores_RTK = plan.options.sel_scores ? static_cast<float*>(sel_scores_RTK.data()) : nullptr,
                    .workspace = workspace});
}

}  // namespace m3
