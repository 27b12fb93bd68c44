// Kernels of tile_gemm.h, compiled once per instruction set (simd.h). A micro-tile is kRows rows x 16 columns of
// accumulators: 12 rows of one vector (AVX-512), 6 of two (AVX2), 3 of four (plain). Per k one panel row is loaded and kRows
// elements of A are broadcast.
#include <cstring>

#include "ops/common/simd.h"
#include "ops/common/tile_gemm.h"

namespace m3 {
namespace {

constexpr int kVecs = 16 / Simd::kLanes;
constexpr int kMicroRows = Simd::kLanes == 16 ? 12 : Simd::kLanes == 8 ? 6 : 3;

template <int kRows>
void micro_tile(const TileGemm& p, int64_t m0, int64_t panel) {
  float* c = p.c + m0 * p.c_row + panel * 16;
  Simd::Vec acc[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      acc[i][v] = p.accumulate ? Simd::load(c + i * p.c_row + v * Simd::kLanes) : Simd::zero();
    }
  }
  const float* b = p.b_panels + panel * p.b_panel_stride;
  const float* a = p.a + m0 * p.a_row;
  for (int64_t k = 0; k < p.k; ++k, b += 16, a += p.a_col) {
    Simd::Vec row[kVecs];
    for (int v = 0; v < kVecs; ++v) row[v] = Simd::load(b + v * Simd::kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Simd::Vec x = Simd::set1(a[i * p.a_row]);
      for (int v = 0; v < kVecs; ++v) acc[i][v] = Simd::fma(x, row[v], acc[i][v]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) Simd::store(c + i * p.c_row + v * Simd::kLanes, acc[i][v]);
  }
}

// Panels outside: one panel of B (8 KB for k = 128) stays in L1 while all rows of A pass.
void gemm(const TileGemm& p) {
  for (int64_t panel = 0; panel * 16 < p.n; ++panel) {
    int64_t m = 0;
    for (; m + kMicroRows <= p.m; m += kMicroRows) micro_tile<kMicroRows>(p, m, panel);
    for (; m + 3 <= p.m; m += 3) micro_tile<3>(p, m, panel);
    for (; m < p.m; ++m) micro_tile<1>(p, m, panel);
  }
}

void exp2_all(const float* x, float* y, int64_t count) {
  int64_t i = 0;
  for (; i + Simd::kLanes <= count; i += Simd::kLanes) Simd::store(y + i, exp2_lanes(Simd::load(x + i)));
  if (i < count) {
    float rest[Simd::kLanes] = {};
    std::memcpy(rest, x + i, (count - i) * sizeof(float));
    Simd::store(rest, exp2_lanes(Simd::load(rest)));
    std::memcpy(y + i, rest, (count - i) * sizeof(float));
  }
}

constexpr TileKernels kTable = {.gemm = gemm, .exp2 = exp2_all};

}  // namespace
}  // namespace m3
