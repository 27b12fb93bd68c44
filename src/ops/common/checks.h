// Checks and type dispatch that most operations share.
#pragma once
#include "tensor/tensor.h"

namespace m3 {

inline void check_on_cpu(const char* name, const Tensor& t) {
  M3_CHECK(t.device().is_cpu(), "{} {} lies on {}: this operation has only a CPU implementation", name,
           t.shape().str(), t.device().str());
}

inline void check_shape(const char* name, const Tensor& t, const Shape& want) {
  M3_CHECK(t.shape() == want, "{} must be {}, got {}", name, want.str(), t.shape().str());
}

inline void check_float(const char* name, const Tensor& t) {
  M3_CHECK(t.dtype() == DType::kF32 || t.dtype() == DType::kBF16, "{} {} must be f32 or bf16, got {}", name,
           t.shape().str(), dtype_name(t.dtype()));
  check_on_cpu(name, t);
}

inline void check_float(const char* name, const Tensor& t, const Shape& want) {
  check_shape(name, t, want);
  check_float(name, t);
}

inline bool is_bf16(const Tensor& t) { return t.dtype() == DType::kBF16; }

inline void round_to(float value, float* out) { *out = value; }
inline void round_to(float value, bf16* out) { *out = bf16(value); }

// Calls f with the elements as const float* or const bf16* (mutable_float: without const).
template <typename F>
void with_float(const Tensor& t, F&& f) {
  if (t.dtype() == DType::kF32) {
    f(static_cast<const float*>(t.data()));
  } else {
    f(static_cast<const bf16*>(t.data()));
  }
}
template <typename F>
void mutable_float(const Tensor& t, F&& f) {
  if (t.dtype() == DType::kF32) {
    f(static_cast<float*>(t.data()));
  } else {
    f(static_cast<bf16*>(t.data()));
  }
}

}  // namespace m3
