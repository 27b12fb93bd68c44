// Three stages, each one parallel region over all experts: gate and up products that read h through the token list of
// their expert, the activation, down products; then the weighted sum per token.
#include "ops/moe_experts/moe_experts.h"

#include <algorithm>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/moe_experts/moe_rows.h"

namespace m3 {
namespace {

// In place where the type allows: the rows are not needed afterwards.
Tensor activation(const Tensor& gate, const Tensor& up, const MoeExperts& experts, DType type,
                  bool keep_gate, Arena& scratch) {
  const bool in_place = type == DType::kF32 && !keep_gate;
  const Tensor act = in_place ? gate : scratch.alloc("expert activation", type, gate.shape());
  swiglu_oai(gate, up, experts.swiglu, act);
  return act;
}

// y_t = scale · Σ_j weight[t, j] · out[row(t, j)] + shared_t, in fp32.
void combine(const MoeShape& shape, const Tensor& weights_TK, float scale, const Tensor& routed,
             const Tensor& shared, const Tensor& y_TC) {
  const int64_t C = shape.C, K = shape.K;
  const float* weights = K > 0 ? weights_TK.ptr<float>() : nullptr;
  const float* from = K > 0 ? routed.ptr<float>() : nullptr;
  const float* add = shared.defined() ? shared.ptr<float>() : nullptr;
  mutable_float(y_TC, [&](auto* y) {
    parallel_rows(shape.T, C * (K + 1), [&](int64_t begin, int64_t end) {
      std::vector<float> sum(C);
      for (int64_t t = begin; t < end; ++t) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t j = 0; j < K; ++j) {
          const float weight = weights[t * K + j];
          const float* row = from + int64_t{shape.groups.row[t * K + j]} * C;
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

}  // namespace

void moe_experts_saving(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                        const MoeExperts& experts, const Tensor& y_TC, const MoeSaved& saved,
                        Arena& scratch, Stream) {
  const MoeShape shape = moe_shape(h_TC, ids_TK, weights_TK, experts);
  check_float("y_TC", y_TC, h_TC.shape());
  const ArenaScope scope(scratch);
  const MoeSaved rows = moe_rows_for(shape, saved, scratch);
  moe_gate_up(h_TC, shape, experts, rows);

  std::vector<GemmProblem> down;
  Tensor routed_out, shared_out;
  if (shape.E > 0) {
    const Tensor act = activation(rows.routed_gate, rows.routed_up, experts, h_TC.dtype(),
                                  saved.routed_gate.defined(), scratch);
    routed_out = scratch.alloc("expert output", DType::kF32, {shape.slots(), shape.C});
    for (int64_t e = 0; e < shape.E; ++e) {
      const int64_t begin = shape.groups.begin[e], end = shape.groups.begin[e + 1];
      if (begin == end) continue;
      down.push_back(gemm_problem(act.rows(begin, end), nullptr, experts.routed[e].down_CF, {},
                                  routed_out.rows(begin, end)));
    }
  }
  if (experts.shared != nullptr) {
    const Tensor act = activation(rows.shared_gate, rows.shared_up, experts, h_TC.dtype(),
                                  saved.shared_gate.defined(), scratch);
    shared_out = scratch.alloc("shared expert output", DType::kF32, {shape.T, shape.C});
    down.push_back(gemm_problem(act, nullptr, experts.shared->down_CF, {}, shared_out));
  }
  gemm_run(down);
  combine(shape, weights_TK, experts.routed_scale, routed_out, shared_out, y_TC);
}

void moe_experts(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                 const MoeExperts& experts, const Tensor& y_TC, Arena& scratch, Stream stream) {
  moe_experts_saving(h_TC, ids_TK, weights_TK, experts, y_TC, {}, scratch, stream);
}

int64_t moe_experts_scratch_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden,
                                  int64_t expert_width, int64_t shared_width) {
  const int64_t per_slot = (2 * 4 + 2) * expert_width + 4 * hidden;
  const int64_t per_token = (2 * 4 + 2) * shared_width + 4 * hidden;
  return num_tokens * (top_k * per_slot + per_token) + 8 * Arena::kAlignment;
}

}  // namespace m3
