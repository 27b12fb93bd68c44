// Between gelu.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

void gelu_portable(const void* x, bool x_bf16, void* y, bool y_bf16, int64_t begin, int64_t end);
void gelu_avx2(const void* x, bool x_bf16, void* y, bool y_bf16, int64_t begin, int64_t end);

}  // namespace m3
