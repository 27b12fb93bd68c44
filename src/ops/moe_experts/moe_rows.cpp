#include "ops/moe_experts/moe_rows.h"

#include "ops/common/checks.h"

namespace m3 {
namespace {

void check_expert(const char* name, int64_t index, const ExpertWeights& w, int64_t hidden,
                  int64_t width) {
  const auto check = [&](const char* part, const Weight& matrix, int64_t out, int64_t in) {
    M3_CHECK(matrix.defined() && matrix.values.shape() == Shape({out, in}),
             "{} {}: {} must be [{}, {}], got {}", name, index, part, out, in,
             matrix.values.shape().str());
  };
  check("gate_FC", w.gate_FC, width, hidden);
  check("up_FC", w.up_FC, width, hidden);
  check("down_CF", w.down_CF, hidden, width);
}

}  // namespace

MoeShape moe_shape(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                   const MoeExperts& experts) {
  M3_CHECK(h_TC.rank() == 2, "h_TC must be [T, C], got {}", h_TC.shape().str());
  check_float("h_TC", h_TC);
  M3_CHECK(!experts.routed.empty() || experts.shared != nullptr,
           "neither routed experts nor a shared expert were given");
  MoeShape s;
  s.T = h_TC.dim(0);
  s.C = h_TC.dim(1);
  s.E = static_cast<int64_t>(experts.routed.size());
  if (s.E > 0) {
    M3_CHECK(ids_TK.rank() == 2 && ids_TK.dim(0) == s.T, "ids_TK must be [{}, K], got {}", s.T,
             ids_TK.shape().str());
    check_shape("weights_TK", weights_TK, ids_TK.shape());
    s.K = ids_TK.dim(1);
    s.F = experts.routed[0].gate_FC.num_out();
    for (int64_t e = 0; e < s.E; ++e) check_expert("expert", e, experts.routed[e], s.C, s.F);
    s.groups = moe_group(ids_TK, s.E);
  }
  if (experts.shared != nullptr) {
    s.F_shared = experts.shared->gate_FC.num_out();
    check_expert("shared expert", 0, *experts.shared, s.C, s.F_shared);
  }
  return s;
}

MoeSaved moe_rows_for(const MoeShape& shape, const MoeSaved& saved, Arena& scratch) {
  const auto tensor = [&](const char* what, const Tensor& given, Shape wanted) {
    if (given.defined()) check_shape(what, given, wanted);
    return given.defined() ? given : scratch.alloc(what, DType::kF32, wanted);
  };
  MoeSaved rows;
  if (shape.E > 0) {
    rows.routed_gate = tensor("expert gate", saved.routed_gate, {shape.slots(), shape.F});
    rows.routed_up = tensor("expert up", saved.routed_up, {shape.slots(), shape.F});
  }
  if (shape.F_shared > 0) {
    rows.shared_gate = tensor("shared expert gate", saved.shared_gate, {shape.T, shape.F_shared});
    rows.shared_up = tensor("shared expert up", saved.shared_up, {shape.T, shape.F_shared});
  }
  return rows;
}

void moe_gate_up(const Tensor& h_TC, const MoeShape& shape, const MoeExperts& experts,
                 const MoeSaved& rows) {
  std::vector<GemmProblem> problems;
  for (int64_t e = 0; e < shape.E; ++e) {
    if (shape.groups.count(e) == 0) continue;
    const int64_t begin = shape.groups.begin[e], end = shape.groups.begin[e + 1];
    const int32_t* tokens = shape.groups.token.data() + begin;
    problems.push_back(gemm_problem(h_TC, tokens, experts.routed[e].gate_FC, {},
                                    rows.routed_gate.rows(begin, end)));
    problems.push_back(
        gemm_problem(h_TC, tokens, experts.routed[e].up_FC, {}, rows.routed_up.rows(begin, end)));
  }
  if (experts.shared != nullptr) {
    problems.push_back(gemm_problem(h_TC, nullptr, experts.shared->gate_FC, {}, rows.shared_gate));
    problems.push_back(gemm_problem(h_TC, nullptr, experts.shared->up_FC, {}, rows.shared_up));
  }
  gemm_run(problems);
}

}  // namespace m3
