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

// Gradients of factor · expert(h) · dy; returns d / d factor. dh_C is added to.
double expert_backward(const Tensor& h, const ExpertWeights& w, const SwigluOai& swiglu,
                       double factor, const Tensor& dy, const ExpertGradients& g,
                       std::vector<double>& dh_C) {
  const int64_t F = w.gate_FC.num_out(), C = w.gate_FC.num_in();
  std::vector<double> gate(F), up(F), act(F), dact(F), dgate(F), dup(F), dh(C);
  const auto view = [](std::vector<double>& values) {
    return Tensor(values.data(), DType::kF64, {1, static_cast<int64_t>(values.size())});
  };
  gemm_ref(h, w.gate_FC, {}, view(gate), false);
  gemm_ref(h, w.up_FC, {}, view(up), false);
  swiglu_oai_ref(view(gate), view(up), swiglu, view(act));
  gemm_backward_x_ref(dy, w.down_CF, view(dact), false);
  double dfactor = 0;
  for (int64_t f = 0; f < F; ++f) {
    dfactor += act[f] * dact[f];
    dact[f] *= factor;
    act[f] *= factor;
  }
  gemm_backward_w_ref(dy, view(act), g.down_CF, {}, true);
  swiglu_oai_backward_ref(view(gate), view(up), swiglu, view(dact), view(dgate), view(dup));
  gemm_backward_w_ref(view(dgate), h, g.gate_FC, {}, true);
  gemm_backward_w_ref(view(dup), h, g.up_FC, {}, true);
  gemm_backward_x_ref(view(dgate), w.gate_FC, view(dh), false);
  gemm_backward_x_ref(view(dup), w.up_FC, view(dh), true);
  for (int64_t c = 0; c < C; ++c) dh_C[c] += dh[c];
  return dfactor;
}

}  // namespace

void moe_experts_ref(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                     const MoeExperts& experts, const Tensor& y_TC) {
  const int64_t C = h_TC.dim(1), K = experts.routed.empty() ? 0 : ids_TK.dim(1);
  for (int64_t t = 0; t < h_TC.dim(0); ++t) {
    std::vector<double> sum(C, 0.0);
    for (int64_t j = 0; j < K; ++j) {
      const ExpertWeights& w = experts.routed[ids_TK.ptr<int32_t>()[t * K + j]];
      add_expert(h_TC.rows(t, t + 1), w, experts.swiglu,
                 experts.routed_scale * value_at(weights_TK, t * K + j), sum);
    }
    if (experts.shared != nullptr)
      add_expert(h_TC.rows(t, t + 1), *experts.shared, experts.swiglu, 1, sum);
    for (int64_t c = 0; c < C; ++c) set_value(y_TC, t * C + c, sum[c]);
  }
}

void moe_experts_backward_ref(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                              const MoeExperts& experts, const Tensor& dy_TC, const Tensor& dh_TC,
                              const Tensor& dweights_TK, const MoeGradients& gradients) {
  const int64_t C = h_TC.dim(1), K = experts.routed.empty() ? 0 : ids_TK.dim(1);
  for (int64_t t = 0; t < h_TC.dim(0); ++t) {
    const Tensor h = h_TC.rows(t, t + 1), dy = dy_TC.rows(t, t + 1);
    std::vector<double> dh(C);
    for (int64_t s = t * K; s < (t + 1) * K; ++s) {
      const int32_t e = ids_TK.ptr<int32_t>()[s];
      const double dfactor = expert_backward(h, experts.routed[e], experts.swiglu,
                                             experts.routed_scale * value_at(weights_TK, s), dy,
                                             gradients.routed[e], dh);
      set_value(dweights_TK, s, experts.routed_scale * dfactor);
    }
    if (experts.shared != nullptr)
      expert_backward(h, *experts.shared, experts.swiglu, 1, dy, *gradients.shared, dh);
    for (int64_t c = 0; c < C; ++c) set_value(dh_TC, t * C + c, value_at(dh_TC, t * C + c) + dh[c]);
  }
}
}  // namespace m3
