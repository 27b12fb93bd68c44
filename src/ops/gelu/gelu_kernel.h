// Between gelu.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

void gelu_portable(const void* x, bool x_bf16, void* y, bool y_bf16, int64_t begin, int64_t end);
void gelu_avx2(const void* x, bool x_bf16, void* y, bool y_bf16, int64_t begin, int64_t end);

struct GeluBackwardParams {
  const void *x, *dy;
  void* dx;
  bool x_bf16, dy_bf16, dx_bf16;
};
void gelu_backward_portable(const GeluBackwardParams& params, int64_t begin, int64_t end);
void gelu_backward_avx2(const GeluBackwardParams& params, int64_t begin, int64_t end);

}  // namespace m3
