// Between adamw.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

struct AdamWParams {
  float* w;
  const float* g;
  void *m, *v;  // f32 | bf16
  void* copy;   // bf16 or null
  bool m_bf16, v_bf16;
  float lr, beta1, beta2, eps, weight_decay, grad_factor;
  float m_correction, v_correction;  // 1 / (1 − beta^step)
};

void adamw_portable(const AdamWParams& params, int64_t begin, int64_t end);
void adamw_avx2(const AdamWParams& params, int64_t begin, int64_t end);

}  // namespace m3
