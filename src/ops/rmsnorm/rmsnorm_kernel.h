// Between rmsnorm.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

struct RmsnormParams {
  void* x;            // [T, C]; written only if delta is given
  const void* delta;  // [T, C] or null
  const void* w;      // [C]
  void* y;            // [T, C]
  bool x_bf16, delta_bf16, w_bf16, y_bf16;
  int64_t hidden;
  float eps;
};

using RmsnormKernel = void (*)(const RmsnormParams& params, int64_t row_begin, int64_t row_end);
void rmsnorm_portable(const RmsnormParams& params, int64_t row_begin, int64_t row_end);
void rmsnorm_avx2(const RmsnormParams& params, int64_t row_begin, int64_t row_end);

struct RmsnormBackwardParams {
  const void *x, *w, *dy;
  void* dx;
  bool x_bf16, w_bf16, dy_bf16, dx_bf16, accumulate_dx;
  int64_t hidden;
  float eps;
};

// dw_C += the rows' share.
void rmsnorm_backward_portable(const RmsnormBackwardParams& params, int64_t row_begin,
                               int64_t row_end, float* dw_C);
void rmsnorm_backward_avx2(const RmsnormBackwardParams& params, int64_t row_begin, int64_t row_end,
                           float* dw_C);

}  // namespace m3
