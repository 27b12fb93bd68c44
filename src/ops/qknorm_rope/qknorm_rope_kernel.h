// Between qknorm_rope.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

struct QknormRopeParams {
  const void* x;         // [T, H, D]
  const void* w;         // [D], or null: rotation only
  const float *cos, *sin;  // [T, M]
  void* y;               // [T, H, D]
  bool x_bf16, w_bf16, y_bf16;
  int64_t num_heads, head_dim, num_pairs;
  float eps;
};

void qknorm_rope_portable(const QknormRopeParams& params, int64_t token_begin, int64_t token_end);
void qknorm_rope_avx2(const QknormRopeParams& params, int64_t token_begin, int64_t token_end);

}  // namespace m3
