#include "ops/rmsnorm/rmsnorm.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/rmsnorm/rmsnorm_kernel.h"

namespace m3 {

void add_rmsnorm(const Tensor& x_TC, const Tensor& delta_TC, const Tensor& w_C, const Tensor& y_TC,
                 float eps, Stream) {
  M3_CHECK(x_TC.rank() == 2 && x_TC.dim(1) > 0, "x_TC must be [T, C > 0], got {}",
           x_TC.shape().str());
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  check_float("x_TC", x_TC);
  check_float("w_C", w_C, {C});
  check_float("y_TC", y_TC, {T, C});
  if (delta_TC.defined()) check_float("delta_TC", delta_TC, {T, C});
  const RmsnormParams params = {
      x_TC.data(),       delta_TC.data(), w_C.data(),    y_TC.data(), is_bf16(x_TC),
      is_bf16(delta_TC), is_bf16(w_C),    is_bf16(y_TC), C,           eps};
  const RmsnormKernel kernel = cpu_isa() >= CpuIsa::kAvx2 ? rmsnorm_avx2 : rmsnorm_portable;
  parallel_rows(T, C, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

void rmsnorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& y_TC, float eps, Stream stream) {
  add_rmsnorm(x_TC, {}, w_C, y_TC, eps, stream);
}

void rmsnorm_backward(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                      const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C, Arena& scratch,
                      Stream) {
  M3_CHECK(x_TC.rank() == 2 && x_TC.dim(1) > 0, "x_TC must be [T, C > 0], got {}",
           x_TC.shape().str());
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  check_float("x_TC", x_TC);
  check_float("w_C", w_C, {C});
  check_float("dy_TC", dy_TC, {T, C});
  check_float("dx_TC", dx_TC, {T, C});
  check_shape("dw_C", dw_C, {C});
  const RmsnormBackwardParams params = {
      x_TC.data(),  w_C.data(),     dy_TC.data(),   dx_TC.data(),  is_bf16(x_TC),
      is_bf16(w_C), is_bf16(dy_TC), is_bf16(dx_TC), accumulate_dx, C,
      eps};
  const auto kernel =
      cpu_isa() >= CpuIsa::kAvx2 ? rmsnorm_backward_avx2 : rmsnorm_backward_portable;
  const ArenaScope scope(scratch);
  const BlockSums sums(T, C, scratch, [&](int64_t begin, int64_t end, float* dw) {
    kernel(params, begin, end, dw);
  });
  sums.add_to(dw_C.ptr<float>(), 0, C);
}

int64_t rmsnorm_backward_scratch_bytes(int64_t num_tokens, int64_t hidden) {
  return BlockSums::scratch_bytes(num_tokens, hidden);
}

}  // namespace m3
