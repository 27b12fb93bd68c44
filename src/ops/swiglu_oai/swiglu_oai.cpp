#include "ops/swiglu_oai/swiglu_oai.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/swiglu_oai/swiglu_oai_kernel.h"

namespace m3 {

void swiglu_oai(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config, const Tensor& a_TF, Stream) {
  check_float("gate_TF", gate_TF);
  check_float("up_TF", up_TF, gate_TF.shape());
  check_float("a_TF", a_TF, gate_TF.shape());
  const auto is_bf16 = [](const Tensor& t) { return t.dtype() == DType::kBF16; };
  const SwigluOaiParams params = {gate_TF.data(), up_TF.data(),  a_TF.data(),  is_bf16(gate_TF), is_bf16(up_TF),
                                  is_bf16(a_TF),  config.alpha,  config.limit, config.beta};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? swiglu_oai_avx2 : swiglu_oai_portable;
  parallel_rows(gate_TF.numel(), 4, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace m3
