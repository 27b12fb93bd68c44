// One token after the other, in fp64.
#include <vector>

#include "ops/common/values.h"
#include "ops/moe_experts/moe_experts.h"

namespace m3 {
namespace {

// sum_C += factor · expert(h), h [1, C] of any type.
void add_expert(const Tensor& h, const ExpertWeights& w, const SwigluOai& swiglu, double factor,
                std::vector<double>& sum_C) {
  const int64_t F = w.gate_FC.num_out(), C = w.gate_FC.num_in();
  std::vector<double> gate(F), up(F), out(C);
  const Tensor gate_1F(gate.data(), DType::kF64, {1, F}), up_1F(up.data(), DType::kF64, {1, F});
  const Tensor out_1C(out.data(), DType::kF64, {1, C});
  gemm_ref(h, w.gate_FC, {}, gate_1F, false);
  gemm_ref(h, w.up_FC, {}, up_1F, false);
  swiglu_oai_ref(gate_1F, up_1F, swiglu, gate_1F);
  gemm_ref(gate_1F, w.down_CF, {}, out_1C, false);
  for (int64_t c = 0; c < C; ++c) sum_C[c] += factor * out[c];
}

}  // namespace

void moe_experts_ref(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK, const MoeExperts& experts,
                     const Tensor& y_TC) {
  const int64_t C = h_TC.dim(1), K = experts.routed.empty() ? 0 : ids_TK.dim(1);
  for (int64_t t = 0; t < h_TC.dim(0); ++t) {
    std::vector<double> sum(C, 0.0);
    for (int64_t j = 0; j < K; ++j) {
      const ExpertWeights& w = experts.routed[ids_TK.ptr<int32_t>()[t * K + j]];
      add_expert(h_TC.rows(t, t + 1), w, experts.swiglu, experts.routed_scale * value_at(weights_TK, t * K + j), sum);
    }
    if (experts.shared != nullptr) add_expert(h_TC.rows(t, t + 1), *experts.shared, experts.swiglu, 1, sum);
    for (int64_t c = 0; c < C; ++c) set_value(y_TC, t * C + c, sum[c]);
  }
}

}  // namespace m3
