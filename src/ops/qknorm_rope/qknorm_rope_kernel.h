// Between qknorm_rope.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

struct QknormRopeParams {
  const void* x;           // [T, H, D]
  const void* w;           // [D], or null: rotation only
  const float *cos, *sin;  // [T, M]
  void* y;                 // [T, H, D]
  bool x_bf16, w_bf16, y_bf16;
  int64_t num_heads, head_dim, num_pairs;
  float eps;
};

void qknorm_rope_portable(const QknormRopeParams& params, int64_t token_begin, int64_t token_end);
void qknorm_rope_avx2(const QknormRopeParams& params, int64_t token_begin, int64_t token_end);

// Gradient; the largest head a kernel file takes is kMaxHeadDim.
inline constexpr int64_t kMaxHeadDim = 1024;
struct QknormRopeBackwardParams {
  const void* x;           // [T, H, D], not read without w
  const void* w;           // [D], or null: rotation only
  const float *cos, *sin;  // [T, M]
  const void* dy;          // [T, H, D]
  void* dx;
  bool x_bf16, w_bf16, dy_bf16, dx_bf16;
  int64_t num_heads, head_dim, num_pairs;
  float eps;
};

// dw_D += the tokens' share; not touched without w.
void qknorm_rope_backward_portable(const QknormRopeBackwardParams& params, int64_t token_begin,
                                   int64_t token_end, float* dw_D);
void qknorm_rope_backward_avx2(const QknormRopeBackwardParams& params, int64_t token_begin,
                               int64_t token_end, float* dw_D);

}  // namespace m3
