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

}  // namespace m3
