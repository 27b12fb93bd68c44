// int8 codes on the GPU; the rule of index_keys8.h.
#pragma once
#include <cmath>

namespace m3 {

__device__ __forceinline__ float finite_abs(float x) {
  return isfinite(x) ? fabsf(x) : 0.0f;
}

// Code of a value; scale: largest finite |value| / 127.
__device__ __forceinline__ int code_of(float x, float scale) {
  if (isnan(x) || !(scale > 0)) return 0;
  return isinf(x) ? (x > 0 ? 127 : -127) : static_cast<int>(rintf(__fdiv_rn(x, scale)));
}

}  // namespace m3
