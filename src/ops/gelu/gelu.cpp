#include "ops/gelu/gelu.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/gelu/gelu_kernel.h"

namespace m3 {

void gelu(const Tensor& x, const Tensor& y, Stream) {
  check_float("x", x);
  check_float("y", y, x.shape());
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? gelu_avx2 : gelu_portable;
  parallel_rows(x.numel(), 4, [&](int64_t begin, int64_t end) {
    kernel(x.data(), is_bf16(x), y.data(), is_bf16(y), begin, end);
  });
}

void gelu_backward(const Tensor& x, const Tensor& dy, const Tensor& dx, Stream) {
  check_float("x", x);
  check_float("dy", dy, x.shape());
  check_float("dx", dx, x.shape());
  const GeluBackwardParams params = {x.data(),   dy.data(),   dx.data(),
                                     is_bf16(x), is_bf16(dy), is_bf16(dx)};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? gelu_backward_avx2 : gelu_backward_portable;
  parallel_rows(x.numel(), 4, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace m3
