// Three stages, each one parallel region over all experts: gate and up products that read h through the token list of
// their expert, the activation, down products; then the weighted sum per token.
#include "ops/moe_experts/moe_experts.h"

#include <algorithm>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/gemm/gemm_problem.h"
#include "ops/moe_experts/moe_groups.h"

namespace m3 {
namespace {

// One set of rows: the routed experts' (T · K) or the shared expert's (T).
struct Rows {
  Tensor gate, up, act, out;
};

Rows alloc_rows(Arena& scratch, int64_t rows, int64_t width, int64_t hidden, DType act_type) {
  Rows r;
  r.gate = scratch.alloc("expert gate", DType::kF32, {rows, width});
  r.up = scratch.alloc("expert up", DType::kF32, {rows, width});
  r.act = act_type == DType::kF32 ? r.gate : scratch.alloc("expert activation", act_type, {rows, width});
  r.out = scratch.alloc("expert output", DType::kF32, {rows, hidden});
  return r;
}

// y_t = scale · Σ_j weight[t, j] · out[row(t, j)] + shared_t, in fp32.
void combine(const MoeGroups& groups, const Tensor& weights_TK, float scale, const Tensor& routed, const Tensor& shared,
             const Tensor& y_TC) {
  const int64_t T = y_TC.dim(0), C = y_TC.dim(1), K = weights_TK.defined() ? weights_TK.dim(1) : 0;
  const float* weights = K > 0 ? weights_TK.ptr<float>() : nullptr;
  const float* from = K > 0 ? routed.ptr<float>() : nullptr;
  const float* add = shared.defined() ? shared.ptr<float>() : nullptr;
  mutable_float(y_TC, [&](auto* y) {
    parallel_rows(T, C * (K + 1), [&](int64_t begin, int64_t end) {
      std::vector<float> sum(C);
      for (int64_t t = begin; t < end; ++t) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t j = 0; j < K; ++j) {
          const float weight = weights[t * K + j];
          const float* row = from + int64_t{groups.row[t * K + j]} * C;
          for (int64_t c = 0; c < C; ++c) sum[c] += weight * row[c];
        }
        for (int64_t c = 0; c < C; ++c) {
          const float routed_sum = scale * sum[c];
          round_to(add != nullptr ? routed_sum + add[t * C + c] : routed_sum, y + t * C + c);
        }
      }
    });
  });
}

void check_expert(const char* name, int64_t index, const ExpertWeights& w, int64_t hidden, int64_t width) {
  const auto check = [&](const char* part, const Weight& matrix, int64_t out, int64_t in) {
    M3_CHECK(matrix.defined() && matrix.values.shape() == Shape({out, in}), "{} {}: {} must be [{}, {}], got {}", name,
             index, part, out, in, matrix.values.shape().str());
  };
  check("gate_FC", w.gate_FC, width, hidden);
  check("up_FC", w.up_FC, width, hidden);
  check("down_CF", w.down_CF, hidden, width);
}

}  // namespace

void moe_experts(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK, const MoeExperts& experts,
                 const Tensor& y_TC, Arena& scratch, Stream) {
  M3_CHECK(h_TC.rank() == 2, "h_TC must be [T, C], got {}", h_TC.shape().str());
  const int64_t T = h_TC.dim(0), C = h_TC.dim(1), E = static_cast<int64_t>(experts.routed.size());
  check_float("h_TC", h_TC);
  check_float("y_TC", y_TC, {T, C});
  M3_CHECK(E > 0 || experts.shared != nullptr, "neither routed experts nor a shared expert were given");
  const ArenaScope scope(scratch);
  MoeGroups groups;
  Rows routed, shared;
  if (E > 0) {
    check_shape("ids_TK", ids_TK, {T, ids_TK.rank() == 2 ? ids_TK.dim(1) : 0});
    check_shape("weights_TK", weights_TK, ids_TK.shape());
    const int64_t F = experts.routed[0].gate_FC.num_out();
    for (int64_t e = 0; e < E; ++e) check_expert("expert", e, experts.routed[e], C, F);
    groups = moe_group(ids_TK, E);
    routed = alloc_rows(scratch, ids_TK.numel(), F, C, h_TC.dtype());
  }
  if (experts.shared != nullptr) {
    const int64_t F = experts.shared->gate_FC.num_out();
    check_expert("shared expert", 0, *experts.shared, C, F);
    shared = alloc_rows(scratch, T, F, C, h_TC.dtype());
  }

  std::vector<GemmProblem> up, down;
  const auto push = [](std::vector<GemmProblem>& list, const Tensor& x, const int32_t* rows, const Weight& w,
                       const Tensor& y) {
    if (y.dim(0) > 0) list.push_back(gemm_problem(x, rows, w, {}, y));
  };
  for (int64_t e = 0; e < E; ++e) {
    const int64_t begin = groups.begin[e], end = groups.begin[e + 1];
    const int32_t* tokens = groups.token.data() + begin;
    push(up, h_TC, tokens, experts.routed[e].gate_FC, routed.gate.rows(begin, end));
    push(up, h_TC, tokens, experts.routed[e].up_FC, routed.up.rows(begin, end));
    push(down, routed.act.rows(begin, end), nullptr, experts.routed[e].down_CF, routed.out.rows(begin, end));
  }
  if (experts.shared != nullptr) {
    push(up, h_TC, nullptr, experts.shared->gate_FC, shared.gate);
    push(up, h_TC, nullptr, experts.shared->up_FC, shared.up);
    push(down, shared.act, nullptr, experts.shared->down_CF, shared.out);
  }
  gemm_run(up);
  if (E > 0) swiglu_oai(routed.gate, routed.up, experts.swiglu, routed.act);
  if (experts.shared != nullptr) swiglu_oai(shared.gate, shared.up, experts.swiglu, shared.act);
  gemm_run(down);
  combine(groups, E > 0 ? weights_TK : Tensor(), experts.routed_scale, routed.out, shared.out, y_TC);
}

int64_t moe_experts_scratch_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t expert_width,
                                  int64_t shared_width) {
  const int64_t per_slot = (2 * 4 + 2) * expert_width + 4 * hidden;
  const int64_t per_token = (2 * 4 + 2) * shared_width + 4 * hidden;
  return num_tokens * (top_k * per_slot + per_token) + 8 * Arena::kAlignment;
}

}  // namespace m3
