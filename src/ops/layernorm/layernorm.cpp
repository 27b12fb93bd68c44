#include "ops/layernorm/layernorm.h"

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/layernorm/layernorm_kernel.h"

namespace m3 {

void layernorm(const Tensor& x_TC, const Tensor& w_C, const Tensor& b_C, const Tensor& y_TC,
               float eps, Stream) {
  M3_CHECK(x_TC.rank() == 2 && x_TC.dim(1) > 0, "x_TC must be [T, C > 0], got {}",
           x_TC.shape().str());
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  check_float("x_TC", x_TC);
  check_float("w_C", w_C, {C});
  check_float("b_C", b_C, {C});
  check_float("y_TC", y_TC, {T, C});
  const LayernormParams params = {
      x_TC.data(),  w_C.data(),   b_C.data(),    y_TC.data(), is_bf16(x_TC),
      is_bf16(w_C), is_bf16(b_C), is_bf16(y_TC), C,           eps};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? layernorm_avx2 : layernorm_portable;
  parallel_rows(T, C, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

void layernorm_backward(const Tensor& x_TC, const Tensor& w_C, const Tensor& dy_TC, float eps,
                        const Tensor& dx_TC, bool accumulate_dx, const Tensor& dw_C,
                        const Tensor& db_C, Arena& scratch, Stream) {
  M3_CHECK(x_TC.rank() == 2 && x_TC.dim(1) > 0, "x_TC must be [T, C > 0], got {}",
           x_TC.shape().str());
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  check_float("x_TC", x_TC);
  check_float("w_C", w_C, {C});
  check_float("dy_TC", dy_TC, {T, C});
  check_float("dx_TC", dx_TC, {T, C});
  check_shape("dw_C", dw_C, {C});
  check_shape("db_C", db_C, {C});
  const LayernormBackwardParams params = {
      x_TC.data(),  w_C.data(),     dy_TC.data(),   dx_TC.data(),  is_bf16(x_TC),
      is_bf16(w_C), is_bf16(dy_TC), is_bf16(dx_TC), accumulate_dx, C,
      eps};
  const auto kernel =
      cpu_isa() >= CpuIsa::kAvx2 ? layernorm_backward_avx2 : layernorm_backward_portable;
  const ArenaScope scope(scratch);
  const BlockSums sums(T, 2 * C, scratch, [&](int64_t begin, int64_t end, float* both) {
    kernel(params, begin, end, both, both + C);
  });
  sums.add_to(dw_C.ptr<float>(), 0, C);
  sums.add_to(db_C.ptr<float>(), C, C);
}

int64_t layernorm_backward_scratch_bytes(int64_t num_tokens, int64_t hidden) {
  return BlockSums::scratch_bytes(num_tokens, 2 * hidden);
}

}  // namespace m3
