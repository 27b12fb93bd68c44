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

}  // namespace m3
