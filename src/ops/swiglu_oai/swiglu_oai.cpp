#include "ops/swiglu_oai/swiglu_oai.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/swiglu_oai/swiglu_oai_kernel.h"

namespace m3 {

void swiglu_oai(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config,
                const Tensor& a_TF, Stream) {
  check_float("gate_TF", gate_TF);
  check_float("up_TF", up_TF, gate_TF.shape());
  check_float("a_TF", a_TF, gate_TF.shape());
  const SwigluOaiParams params = {gate_TF.data(),   up_TF.data(),   a_TF.data(),
                                  is_bf16(gate_TF), is_bf16(up_TF), is_bf16(a_TF),
                                  config.alpha,     config.limit,   config.beta};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? swiglu_oai_avx2 : swiglu_oai_portable;
  parallel_rows(gate_TF.numel(), 4,
                [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

void swiglu_oai_backward(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config,
                         const Tensor& da_TF, const Tensor& dgate_TF, const Tensor& dup_TF,
                         Stream) {
  check_float("gate_TF", gate_TF);
  check_float("up_TF", up_TF, gate_TF.shape());
  check_float("da_TF", da_TF, gate_TF.shape());
  check_float("dgate_TF", dgate_TF, gate_TF.shape());
  check_float("dup_TF", dup_TF, gate_TF.shape());
  const SwigluOaiParams forward = {gate_TF.data(),   up_TF.data(),   nullptr,
                                   is_bf16(gate_TF), is_bf16(up_TF), false,
                                   config.alpha,     config.limit,   config.beta};
  const SwigluOaiBackwardParams params = {forward,        da_TF.data(),   dgate_TF.data(),
                                          dup_TF.data(),  is_bf16(da_TF), is_bf16(dgate_TF),
                                          is_bf16(dup_TF)};
  const auto kernel =
      cpu_isa() >= CpuIsa::kAvx2 ? swiglu_oai_backward_avx2 : swiglu_oai_backward_portable;
  parallel_rows(gate_TF.numel(), 4,
                [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace m3
