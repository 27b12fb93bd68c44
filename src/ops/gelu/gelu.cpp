#include "ops/gelu/gelu.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/gelu/gelu_kernel.h"

namespace m3 {

void gelu(const Tensor& x, const Tensor& y, Stream) {
  check_float("x", x);
  check_float("y", y, x.shape());
  const bool x_bf16 = x.dtype() == DType::kBF16, y_bf16 = y.dtype() == DType::kBF16;
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? gelu_avx2 : gelu_portable;
  parallel_rows(x.numel(), 4,
                [&](int64_t begin, int64_t end) { kernel(x.data(), x_bf16, y.data(), y_bf16, begin, end); });
}

}  // namespace m3
