#include <algorithm>
#include <cmath>

#include "ops/common/values.h"
#include "ops/swiglu_oai/swiglu_oai.h"

namespace m3 {

void swiglu_oai_ref(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config, const Tensor& a_TF) {
  const double limit = config.limit;
  for (int64_t i = 0; i < gate_TF.numel(); ++i) {
    const double g = std::min(value_at(gate_TF, i), limit);
    const double u = std::clamp(value_at(up_TF, i), -limit, limit);
    set_value(a_TF, i, (u + config.beta) * g / (1 + std::exp(-double{config.alpha} * g)));
  }
}

void swiglu_oai_backward_ref(const Tensor& gate_TF, const Tensor& up_TF, const SwigluOai& config, const Tensor& da_TF,
                             const Tensor& dgate_TF, const Tensor& dup_TF) {
  const double limit = config.limit, alpha = config.alpha;
  for (int64_t i = 0; i < gate_TF.numel(); ++i) {
    const double gate = value_at(gate_TF, i), up = value_at(up_TF, i), da = value_at(da_TF, i);
    const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit), s = 1 / (1 + std::exp(-alpha * g));
    set_value(dgate_TF, i, gate > limit ? 0 : da * (u + config.beta) * s * (1 + alpha * g * (1 - s)));
    set_value(dup_TF, i, std::abs(up) > limit ? 0 : da * g * s);
  }
}

}  // namespace m3
