#include "ops/rmsnorm/rmsnorm.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/rmsnorm/rmsnorm_kernel.h"

namespace m3 {

void add_rmsnorm(const Tensor& x_TC, const Tensor& delta_TC, const Tensor& w_C, const Tensor& y_TC, float eps, Stream) {
  M3_CHECK(x_TC.rank() == 2 && x_TC.dim(1) > 0, "x_TC must be [T, C > 0], got {}", x_TC.shape().str());
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  check_float("x_TC", x_TC);
  check_float("w_C", w_C, {C});
  check_float("y_TC", y_TC, {T, C});
  if (delta_TC.defined()) check_float("delta_TC", delta_TC, {T, C});
  const auto is_bf16 = [](const Tensor& t) { return t.dtype() == DType::kBF16; };
  const RmsnormParams params = {x_TC.data(),    delta_TC.data(),   w_C.data(),   y_TC.data(), is_bf16(x_TC),
                                is_bf16(delta_TC), is_bf16(w_C), is_bf16(y_TC), C,           eps};
  const RmsnormKernel kernel = cpu_isa() >= CpuIsa::kAvx2 ? rmsnorm_avx2 : rmsnorm_portable;
  parallel_rows(T, C, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

void rmsnorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps, Stream stream) {
  add_rmsnorm(x_TC, {}, w_C, y_TC, eps, stream);
}

}  // namespace m3
