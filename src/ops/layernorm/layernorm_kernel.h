// Between layernorm.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

struct LayernormParams {
  const void *x, *w, *b;
  void* y;
  bool x_bf16, w_bf16, b_bf16, y_bf16;
  int64_t hidden;
  float eps;
};

void layernorm_portable(const LayernormParams& params, int64_t row_begin, int64_t row_end);
void layernorm_avx2(const LayernormParams& params, int64_t row_begin, int64_t row_end);

struct LayernormBackwardParams {
  const void *x, *w, *dy;
  void* dx;
  bool x_bf16, w_bf16, dy_bf16, dx_bf16, accumulate_dx;
  int64_t hidden;
  float eps;
};

// dw_C and db_C += the rows' share.
void layernorm_backward_portable(const LayernormBackwardParams& params, int64_t row_begin,
                                 int64_t row_end, float* dw_C, float* db_C);
void layernorm_backward_avx2(const LayernormBackwardParams& params, int64_t row_begin,
                             int64_t row_end, float* dw_C, float* db_C);

}  // namespace m3
