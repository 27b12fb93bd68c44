// Element types. F64 exists for references; E4M3 and U8 for 8-bit checkpoints and pictures.
#pragma once
#include <cstdint>

#include "base/bf16.h"
#include "base/check.h"

namespace m3 {

enum class DType : uint8_t { kF32, kBF16, kF64, kI32, kI64, kU8, kE4M3 };

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32: case DType::kI32: return 4;
    case DType::kBF16: return 2;
    case DType::kF64: case DType::kI64: return 8;
    case DType::kU8: case DType::kE4M3: return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF64: return "f64";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kE4M3: return "e4m3";
  }
  return "?";
}

template <typename T> struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::kF32; };
template <> struct DTypeOf<bf16> { static constexpr DType value = DType::kBF16; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::kF64; };
template <> struct DTypeOf<int32_t> { static constexpr DType value = DType::kI32; };
template <> struct DTypeOf<int64_t> { static constexpr DType value = DType::kI64; };
template <> struct DTypeOf<uint8_t> { static constexpr DType value = DType::kU8; };

}  // namespace m3
