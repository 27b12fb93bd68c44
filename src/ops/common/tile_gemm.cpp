#include "ops/common/tile_gemm.h"

#include <cstring>

#include "base/cpu_features.h"

namespace m3 {

const TileKernels& tile_kernels() {
  switch (cpu_isa()) {
#if defined(__x86_64__)
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAvx512: return kTileAvx512;
    case CpuIsa::kAvx2: return kTileAvx2;
#endif
    default: return kTilePortable;
  }
}

void tile_widen(const void* row, DType dtype, int64_t n, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, row, n * sizeof(float));
    return;
  }
  const bf16* from = static_cast<const bf16*>(row);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(from[i]);
}

void tile_pack_row(const void* row, DType dtype, int64_t i, int64_t n, float* panels, int64_t panel_stride) {
  const int64_t size = dtype_bytes(dtype);
  for (int64_t c = 0; c < n; c += kTilePanel) {
    float* out = panels + c / kTilePanel * panel_stride + i * kTilePanel;
    const int64_t count = n - c < kTilePanel ? n - c : kTilePanel;
    tile_widen(static_cast<const char*>(row) + c * size, dtype, count, out);
    for (int64_t j = count; j < kTilePanel; ++j) out[j] = 0;
  }
}

void tile_pack_column(const void* row, DType dtype, int64_t i, int64_t k, float* panels, int64_t panel_stride) {
  float* out = panels + i / kTilePanel * panel_stride + i % kTilePanel;
  for (int64_t c = 0; c < k; ++c) {
    out[c * kTilePanel] =
        dtype == DType::kF32 ? static_cast<const float*>(row)[c] : static_cast<float>(static_cast<const bf16*>(row)[c]);
  }
}

}  // namespace m3
