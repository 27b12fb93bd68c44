#include "ops/layernorm/layernorm.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/layernorm/layernorm_kernel.h"

namespace m3 {

void layernorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC, float eps, Stream) {
  M3_CHECK(x_TC.rank() == 2 && x_TC.dim(1) > 0, "x_TC must be [T, C > 0], got {}", x_TC.shape().str());
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  check_float("x_TC", x_TC);
  check_float("w_C", w_C, {C});
  check_float("b_C", b_C, {C});
  check_float("y_TC", y_TC, {T, C});
  const auto is_bf16 = [](const Tensor& t) { return t.dtype() == DType::kBF16; };
  const LayernormParams params = {x_TC.data(),  w_C.data(),   b_C.data(),    y_TC.data(), is_bf16(x_TC),
                                  is_bf16(w_C), is_bf16(b_C), is_bf16(y_TC), C,           eps};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? layernorm_avx2 : layernorm_portable;
  parallel_rows(T, C, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace m3
