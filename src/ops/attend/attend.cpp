#include "ops/attend/attend.h"

#include "ops/attend/attend_cpu.h"
#include "ops/attend/attend_cuda.h"
#include "ops/common/msa_keys.h"

namespace m3 {
namespace {

void check_support(const AttendSupport& s) {
  if (s.kind == AttendSupport::Kind::kWindow) {
    M3_CHECK(s.window >= 1 && s.sink >= 0, "attend: window {} must be at least 1 and sink {} at least 0", s.window,
             s.sink);
  }
  if (s.kind == AttendSupport::Kind::kTokens) {
    M3_CHECK(s.budget >= 1, "attend: token lists of length {}, want at least 1", s.budget);
  }
}

AttendPath cuda_path(const AttendPlan& plan, const MsaBatch& batch, DType query_dtype, DType kv_dtype,
                     DType out_dtype) {
  return attend_cuda_path(plan.geometry, batch, plan.options.support, query_dtype, kv_dtype, out_dtype);
}

}  // namespace

const char* attend_path(const AttendPlan& plan, const MsaBatch& batch, DType query_dtype, DType kv_dtype,
                        DType out_dtype) {
  if (plan.device.is_cpu()) return "cpu";
  return attend_path_name(cuda_path(plan, batch, query_dtype, kv_dtype, out_dtype));
}

AttendPlan attend_plan(const MsaGeometry& geometry, const MsaBatch& batch, const AttendOptions& options,
                       Device device) {
  geometry.check();
  check_support(options.support);
  AttendPlan plan{.geometry = geometry, .options = options, .device = device, .num_queries = batch.num_queries};
  if (!device.is_cpu()) {
    M3_CHECK(batch.num_queries == 0 || (batch.max_q_len > 0 && batch.max_k_len >= 0),
             "attend on {}: the batch must carry max_q_len and max_k_len, got {} and {}", device.str(), batch.max_q_len,
             batch.max_k_len);
    plan.workspace_bytes = attend_cuda_workspace_bytes(geometry, batch, options.support);
    return plan;
  }
  batch.check(geometry.block);
  attend_cpu_plan(plan, batch);
  return plan;
}

void attend(const AttendPlan& plan, const MsaBatch& batch, const Tensor& q_THD, const Tensor& k, const Tensor& v,
            const Tensor& lists, const Tensor& o_THD, const Tensor& lse_TH, void* workspace, Stream stream) {
  const MsaGeometry& g = plan.geometry;
  const AttendSupport& support = plan.options.support;
  const int64_t T = plan.num_queries;
  M3_CHECK(batch.num_queries == T, "attend: the plan was made for {} query rows, got {}", T, batch.num_queries);
  msa_check_tensor("q_THD", q_THD, {T, g.heads(), g.head_dim}, plan.device);
  msa_check_tensor("o_THD", o_THD, {T, g.heads(), g.head_dim}, plan.device);
  msa_check_float("q_THD", q_THD);
  msa_check_float("o_THD", o_THD);
  M3_CHECK(k.dtype() == v.dtype(), "k holds {} and v {}, want one type", dtype_name(k.dtype()), dtype_name(v.dtype()));
  if (lse_TH.defined()) {
    msa_check_tensor("lse_TH", lse_TH, {T, g.heads()}, plan.device);
    M3_CHECK(lse_TH.dtype() == DType::kF32, "lse_TH holds {}, want f32", dtype_name(lse_TH.dtype()));
  }
  const bool has_lists = support.kind == AttendSupport::Kind::kBlocks || support.kind == AttendSupport::Kind::kTokens;
  if (has_lists) {
    const bool blocks = support.kind == AttendSupport::Kind::kBlocks;
    msa_check_tensor(blocks ? "ids_RTK" : "tokens_TK", lists,
                     blocks ? Shape{g.groups, T, g.topk} : Shape{T, support.budget}, plan.device);
    M3_CHECK(lists.dtype() == DType::kI32, "attend: lists hold {}, want i32", dtype_name(lists.dtype()));
  }
  M3_CHECK(workspace != nullptr || plan.workspace_bytes == 0, "attend: workspace absent, want {} bytes",
           plan.workspace_bytes);
  if (T == 0) return;
  if (!plan.device.is_cpu()) {
    for (const auto& [name, tensor] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
      msa_check_float(name, *tensor);
      const bool paged = batch.layout == KvLayout::kPaged;
      msa_check_tensor(name, *tensor,
                       paged ? Shape{k.dim(0), g.groups, g.block, g.head_dim} : Shape{k.dim(0), g.groups, g.head_dim},
                       plan.device);
    }
    M3_CHECK(attend_cuda_workspace_bytes(g, batch, support) <= plan.workspace_bytes,
             "attend: the batch's bounds exceed those the plan was made for");
    attend_cuda({.geometry = g,
                 .batch = batch,
                 .support = support,
                 .query_dtype = q_THD.dtype(),
                 .kv_dtype = k.dtype(),
                 .out_dtype = o_THD.dtype(),
                 .q_THD = q_THD.data(),
                 .k = k.data(),
                 .v = v.data(),
                 .num_pages = k.dim(0),
                 .lists = has_lists ? static_cast<const int32_t*>(lists.data()) : nullptr,
                 .o_THD = o_THD.data(),
                 .lse_TH = lse_TH.defined() ? static_cast<float*>(lse_TH.data()) : nullptr,
                 .workspace = workspace},
                cuda_path(plan, batch, q_THD.dtype(), k.dtype(), o_THD.dtype()), stream);
    return;
  }
  attend_cpu(plan, batch,
             {.q_THD = &q_THD,
              .k = &k,
              .v = &v,
              .o_THD = &o_THD,
              .lists = has_lists ? static_cast<const int32_t*>(lists.data()) : nullptr,
              .lse_TH = lse_TH.defined() ? static_cast<float*>(lse_TH.data()) : nullptr,
              .workspace = workspace});
}

}  // namespace m3
