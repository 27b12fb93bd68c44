// Elements of host tensors by flat index, as double: for references and tests, where clarity counts more than speed.
#pragma once
#include "tensor/tensor.h"

namespace m3 {

inline double value_at(const Tensor& t, int64_t at) {
  switch (t.dtype()) {
    case DType::kF32: return static_cast<const float*>(t.data())[at];
    case DType::kBF16: return static_cast<float>(static_cast<const bf16*>(t.data())[at]);
    case DType::kF64: return static_cast<const double*>(t.data())[at];
    case DType::kI32: return static_cast<const int32_t*>(t.data())[at];
    case DType::kI64: return static_cast<double>(static_cast<const int64_t*>(t.data())[at]);
    case DType::kU8: return static_cast<const uint8_t*>(t.data())[at];
    case DType::kE4M3: break;
  }
  M3_FAIL("tensor {} holds {}, which has no plain values", t.shape().str(), dtype_name(t.dtype()));
}

// Floating-point tensors only; rounds to the nearest, ties to even (bf16: through fp32).
inline void set_value(const Tensor& t, int64_t at, double value) {
  switch (t.dtype()) {
    case DType::kF32: static_cast<float*>(t.data())[at] = static_cast<float>(value); return;
    case DType::kBF16: static_cast<bf16*>(t.data())[at] = bf16(static_cast<float>(value)); return;
    case DType::kF64: static_cast<double*>(t.data())[at] = value; return;
    default: M3_FAIL("cannot store a fraction in a tensor of {}", dtype_name(t.dtype()));
  }
}

}  // namespace m3
