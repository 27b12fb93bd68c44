// GEMM kernels as templates over an instruction set. Both operands have k contiguous, so a vector holds
// consecutive k of one row, and a tile of kMr x 4 outputs keeps one vector of partial sums each: per step
// kMr + 4 loads feed 4 · kMr multiply-adds. Operands are packed into panels
//   panel[step][row][lane]        a step is D::kStep consecutive k
// which widens them, pads k with zeros, and makes the inner loop read two plain streams.
//
//   block   x block [144, 512] packed into L2 (288 KB as f32); two panels of weight rows at a time (16 KB) in L1,
//           against which all x tiles pass. Packing costs about 5 cycles a vector into L2 and 2 into L1, so x, which
//           goes to L2, is the side that is packed once for up to 512 columns.
//   rows    few rows of x, resident in L1; weights stream from memory through registers, nothing is packed.
#pragma once
#include <cstring>

#include "ops/common/simd_formats.h"
#include "ops/gemm/gemm_kernel.h"

namespace m3 {
namespace {

// fp32 multiply-adds; kRows x 4 sums.
template <int kRows>
struct DotF32 {
  using Elem = float;
  using Reg = Simd::Vec;
  static constexpr int kMr = kRows;
  static constexpr int kStep = Simd::kLanes;
  static constexpr int kTranspose = Simd::kLanes;
  static constexpr bool kFromF32 = true;
  static Reg zero() { return Simd::zero(); }
  static Reg load(const float* p) { return Simd::load(p); }
  static Reg dot(Reg a, Reg b, Reg c) { return Simd::fma(a, b, c); }

  // kStep values from storage.
  static Reg from(const float* p) { return Simd::load(p); }
  static Reg from(const uint16_t* p) { return load_wide(p); }
  static Reg from_e4m3(const uint8_t* p, float scale) {
    return Simd::mul(load_e4m3(p), Simd::set1(scale));
  }
  static void store(float* p, Reg r) { Simd::store(p, r); }

  static float from_one(float x) { return x; }
  static float from_one(uint16_t x) { return widen(x); }
  // out[i][j] = src[j][first + i], i and j below kTranspose.
  template <class T>
  static void transpose(const T* const* src, int first, float* const* out) {
    Reg r[kTranspose];
    for (int j = 0; j < kTranspose; ++j) r[j] = load_wide(src[j] + first);
    transpose_lanes(r);
    for (int i = 0; i < kTranspose; ++i) Simd::store(out[i], r[i]);
  }
};

template <class T>
const T* row_of(const void* base, int64_t row, int64_t row_elements) {
  return static_cast<const T*>(base) + row * row_elements;
}

M3_SIMD_INLINE float e8m0(uint8_t byte) {
  return float_of_bits(byte == 255 ? 0x7fc00000u
                       : byte == 0 ? 0x00400000u /* 2^-127 */
                                   : uint32_t{byte} << 23);
}

// Where one row goes: steps of D::kStep elements, `stride` apart.
template <class D>
struct Slot {
  typename D::Elem* out;
  int64_t stride;
  typename D::Elem* at(int k) const { return out + k / D::kStep * stride + k % D::kStep; }
};

// Slot of row i of `rows` rows packed into tiles of at most `tile` rows of kp elements.
template <class D>
Slot<D> slot_of(typename D::Elem* panels, int i, int rows, int tile, int64_t kp) {
  const int first = i / tile * tile;
  const int height = rows - first < tile ? rows - first : tile;
  return {panels + first * kp + (i - first) * D::kStep, int64_t{height} * D::kStep};
}

template <class D>
void pack_zeros(const Slot<D>& slot, int64_t kp) {
  for (int64_t k = 0; k < kp; k += D::kStep)
    std::memset(slot.at(k), 0, D::kStep * sizeof(typename D::Elem));
}

// kc elements, then zeros up to a full step.
template <class D, class T>
void pack_row(const T* src, int64_t kc, const Slot<D>& slot) {
  typename D::Elem* out = slot.out;
  int64_t k = 0;
  for (; k + D::kStep <= kc; k += D::kStep, out += slot.stride) D::store(out, D::from(src + k));
  if (k < kc) {
    T tail[D::kStep] = {};
    std::memcpy(tail, src + k, (kc - k) * sizeof(T));
    D::store(out, D::from(tail));
  }
}

// kc is a multiple of 32 (one scale), and a step divides 32.
template <class D>
void pack_row_e4m3(const uint8_t* src, const uint8_t* scales, int64_t kc, const Slot<D>& slot) {
  typename D::Elem* out = slot.out;
  for (int64_t k = 0; k < kc; k += 32) {
    const float scale = e8m0(scales[k / 32]);
    for (int i = 0; i < 32; i += D::kStep, out += slot.stride)
      D::store(out, D::from_e4m3(src + k + i, scale));
  }
}

// Rows r0 .. r0 + count of the transpose of a matrix with `cols` columns (row r is its column r), kTranspose rows by as
// many k at a time; `rows` picks stored rows.
template <class D, class T>
void pack_transposed(const void* base, int64_t cols, const int32_t* rows, int64_t r0, int count,
                     int64_t k0, int kc, int kp, const Slot<D>* slots) {
  constexpr int kSide = D::kTranspose;
  if (kc < kp) {
    for (int i = 0; i < count; ++i)
      std::memset(slots[i].at(kp - D::kStep), 0, D::kStep * sizeof(typename D::Elem));
  }
  const auto source = [&](int k) {
    return row_of<T>(base, rows ? rows[k0 + k] : k0 + k, cols) + r0;
  };
  int k = 0;
  for (; k + kSide <= kc; k += kSide) {
    const T* src[kSide];
    for (int j = 0; j < kSide; ++j) src[j] = source(k + j);
    int i = 0;
    for (; i + kSide <= count; i += kSide) {
      typename D::Elem* out[kSide];
      for (int j = 0; j < kSide; ++j) out[j] = slots[i + j].at(k);
      D::transpose(src, i, out);
    }
    for (; i < count; ++i) {
      for (int j = 0; j < kSide; ++j) slots[i].at(k)[j] = D::from_one(src[j][i]);
    }
  }
  for (; k < kc; ++k) {
    const T* src = source(k);
    for (int i = 0; i < count; ++i) *slots[i].at(k) = D::from_one(src[i]);
  }
}

// Rows m0 .. m0 + count of a into x tiles.
template <class D>
void pack_a(const GemmProblem& p, int64_t m0, int count, int64_t k0, int64_t kc, int64_t kp,
            typename D::Elem* panels) {
  Slot<D> slots[kGemmBlockM];
  for (int i = 0; i < count; ++i) slots[i] = slot_of<D>(panels, i, count, D::kMr, kp);
  const bool is_f32 = p.a_type == GemmType::kF32;
  if (p.a_transposed) {
    if (!is_f32) {
      pack_transposed<D, uint16_t>(p.a, p.m, p.a_rows, m0, count, k0, kc, kp, slots);
    } else if constexpr (D::kFromF32) {
      pack_transposed<D, float>(p.a, p.m, p.a_rows, m0, count, k0, kc, kp, slots);
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    const int64_t row = p.a_rows ? p.a_rows[m0 + i] : m0 + i;
    if (!is_f32) {
      pack_row<D>(row_of<uint16_t>(p.a, row, p.k) + k0, kc, slots[i]);
    } else if constexpr (D::kFromF32) {
      pack_row<D>(row_of<float>(p.a, row, p.k) + k0, kc, slots[i]);
    }
  }
}

// Columns of c whose weights are packed at a time: two panels, or as many as one transposition gives.
template <class D>
constexpr int kPanelCols = D::kTranspose > 8 ? D::kTranspose : 8;

// Rows n0 .. n0 + count of b into panels of 4; the last panel is filled up with zero rows.
template <class D>
void pack_b(const GemmProblem& p, int64_t n0, int count, int64_t k0, int64_t kc, int64_t kp,
            typename D::Elem* panels) {
  Slot<D> slots[kPanelCols<D>];
  const int full = (count + 3) / 4 * 4;
  for (int i = 0; i < full; ++i) slots[i] = slot_of<D>(panels, i, full, 4, kp);
  for (int i = count; i < full; ++i) pack_zeros<D>(slots[i], kp);
  if (p.b_transposed) {
    if (p.b_type == GemmType::kBf16) {
      pack_transposed<D, uint16_t>(p.b, p.n, p.b_rows, n0, count, k0, kc, kp, slots);
    } else if constexpr (D::kFromF32) {
      pack_transposed<D, float>(p.b, p.n, p.b_rows, n0, count, k0, kc, kp, slots);
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    const int64_t n = n0 + i;
    if (p.b_type == GemmType::kE4m3) {
      pack_row_e4m3<D>(row_of<uint8_t>(p.b, n, p.k) + k0, p.b_scales + (n * p.k + k0) / 32, kc,
                       slots[i]);
    } else if (p.b_type == GemmType::kBf16) {
      pack_row<D>(row_of<uint16_t>(p.b, n, p.k) + k0, kc, slots[i]);
    } else if constexpr (D::kFromF32) {
      pack_row<D>(row_of<float>(p.b, n, p.k) + k0, kc, slots[i]);
    }
  }
}

// Where the inner loop finds its vectors: in a panel, or in the stored rows themselves.
template <class D>
struct PanelA {
  const typename D::Elem* panel;
  template <int kRows>
  typename D::Reg load(int step, int i) const {
    return D::load(panel + (step * kRows + i) * D::kStep);
  }
};
template <class D, class T>
struct RowsA {
  const T* row[D::kMr];
  template <int kRows>
  typename D::Reg load(int step, int i) const {
    return D::from(row[i] + step * D::kStep);
  }
};
template <class D>
struct PanelB {
  const typename D::Elem* panel;
  typename D::Reg load(int step, int j) const { return D::load(panel + (step * 4 + j) * D::kStep); }
};
template <class D, class T>
struct RowsB {
  const T* row[4];
  typename D::Reg load(int step, int j) const { return D::from(row[j] + step * D::kStep); }
};

template <class D, class T>
RowsB<D, T> rows_b(const GemmProblem& p, int64_t n, int64_t k0) {
  const T* row = row_of<T>(p.b, n, p.k) + k0;
  return {{row, row + p.k, row + 2 * p.k, row + 3 * p.k}};
}

// acc[i, 0:4] += Σ over `steps` of a_i · b_j for kRows rows of a.
template <class D, int kRows, class A, class B>
void micro_tile(const A& a, const B& b, int steps, float* acc, int64_t acc_stride) {
  typename D::Reg sum[kRows][4];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < 4; ++j) sum[i][j] = D::zero();
  }
  for (int step = 0; step < steps; ++step) {
    typename D::Reg x[kRows];
    for (int i = 0; i < kRows; ++i) x[i] = a.template load<kRows>(step, i);
    for (int j = 0; j < 4; ++j) {
      const typename D::Reg w = b.load(step, j);
      for (int i = 0; i < kRows; ++i) sum[i][j] = D::dot(x[i], w, sum[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) add_lane_sums(acc + i * acc_stride, sum[i]);
}

template <class D, class A, class B>
void micro_tile_any(int rows, const A& a, const B& b, int steps, float* acc, int64_t acc_stride) {
  switch (rows) {
    case 1:
      return micro_tile<D, 1>(a, b, steps, acc, acc_stride);
    case 2:
      return micro_tile<D, 2>(a, b, steps, acc, acc_stride);
    case 3:
      return micro_tile<D, 3>(a, b, steps, acc, acc_stride);
  }
  if constexpr (D::kMr > 3) {
    switch (rows) {
      case 4:
        return micro_tile<D, 4>(a, b, steps, acc, acc_stride);
      case 5:
        return micro_tile<D, 5>(a, b, steps, acc, acc_stride);
      case 6:
        return micro_tile<D, 6>(a, b, steps, acc, acc_stride);
    }
  }
}

// c[m, n0 : n0 + count] from finished sums, which it changes.
void store_row(const GemmProblem& p, int64_t m, int64_t n0, int count, float* acc) {
  if (p.bias != nullptr && p.bias_type == GemmType::kF32) {
    const float* bias = static_cast<const float*>(p.bias) + n0;
    for (int j = 0; j < count; ++j) acc[j] += bias[j];
  } else if (p.bias != nullptr) {
    const uint16_t* bias = static_cast<const uint16_t*>(p.bias) + n0;
    for (int j = 0; j < count; ++j) acc[j] += widen(bias[j]);
  }
  if (p.c_type == GemmType::kBf16) {
    uint16_t* c = static_cast<uint16_t*>(p.c) + m * p.n + n0;
    int j = 0;
    for (; j + Simd::kLanes <= count; j += Simd::kLanes) store_narrow(c + j, Simd::load(acc + j));
    for (; j < count; ++j) narrow(acc[j], c + j);
    return;
  }
  float* c = static_cast<float*>(p.c) + m * p.n + n0;
  if (p.accumulate) {
    for (int j = 0; j < count; ++j) c[j] += acc[j];
  } else {
    std::memcpy(c, acc, count * sizeof(float));
  }
}

template <class D>
constexpr int64_t padded(int64_t kc) {
  return (kc + D::kStep - 1) / D::kStep * D::kStep;
}

template <class D>
void gemm_block(const GemmProblem& p, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  using Elem = typename D::Elem;
  alignas(64) Elem w_panels[kPanelCols<D> * kGemmBlockK];
  alignas(64) Elem x_panels[kGemmBlockM * kGemmBlockK];
  alignas(64) float acc[kGemmBlockM * kGemmBlockN];
  const int rows = static_cast<int>(m1 - m0), cols = static_cast<int>(n1 - n0);
  for (int i = 0; i < rows; ++i) std::memset(acc + i * kGemmBlockN, 0, (cols + 3) / 4 * 16);
  for (int64_t k0 = 0; k0 < p.k; k0 += kGemmBlockK) {
    const int kc = static_cast<int>(p.k - k0 < kGemmBlockK ? p.k - k0 : kGemmBlockK);
    const int kp = static_cast<int>(padded<D>(kc));
    pack_a<D>(p, m0, rows, k0, kc, kp, x_panels);
    for (int j0 = 0; j0 < cols; j0 += kPanelCols<D>) {
      const int panel_cols = cols - j0 < kPanelCols<D> ? cols - j0 : kPanelCols<D>;
      pack_b<D>(p, n0 + j0, panel_cols, k0, kc, kp, w_panels);
      for (int i = 0; i < rows; i += D::kMr) {
        const int tile_rows = rows - i < D::kMr ? rows - i : D::kMr;
        for (int j = 0; j < panel_cols; j += 4) {
          micro_tile_any<D>(tile_rows, PanelA<D>{x_panels + i * kp}, PanelB<D>{w_panels + j * kp},
                            kp / D::kStep, acc + i * kGemmBlockN + j0 + j, kGemmBlockN);
        }
      }
    }
  }
  for (int i = 0; i < rows; ++i) store_row(p, m0 + i, n0, cols, acc + i * kGemmBlockN);
}

// Columns of c that gemm_rows_of finishes together: as many as make storing them cheap.
constexpr int kRowsCols = 64;

// The rows of a in tiles of at most kMr, against four rows of b.
template <class D, class T, class B>
void rows_tiles(const GemmProblem& p, int64_t k0, int steps, const B& b, float* acc) {
  for (int64_t i = 0; i < p.m; i += D::kMr) {
    const int rows = static_cast<int>(p.m - i < D::kMr ? p.m - i : D::kMr);
    RowsA<D, T> a;
    for (int r = 0; r < rows; ++r)
      a.row[r] = row_of<T>(p.a, p.a_rows ? p.a_rows[i + r] : i + r, p.k) + k0;
    micro_tile_any<D>(rows, a, b, steps, acc + i * kRowsCols, kRowsCols);
  }
}

// As rows_tiles, for rows packed by pack_a.
template <class D, class B>
void packed_tiles(int64_t m, const typename D::Elem* panels, int64_t kp, const B& b, float* acc) {
  for (int64_t i = 0; i < m; i += D::kMr) {
    const int rows = static_cast<int>(m - i < D::kMr ? m - i : D::kMr);
    micro_tile_any<D>(rows, PanelA<D>{panels + i * kp}, b, static_cast<int>(kp / D::kStep),
                      acc + i * kRowsCols, kRowsCols);
  }
}

// A block of k that is no whole number of steps (the last one) goes through panels, which pad it with zeros.
template <class D, class T>
void gemm_rows_of(const GemmProblem& p, int64_t n0, int64_t n1) {
  using Elem = typename D::Elem;
  alignas(64) Elem w_panel[4 * kGemmBlockK];
  alignas(64) Elem x_panels[kGemmMaxRowsM * kGemmBlockK];
  const int64_t whole_k = p.k % D::kStep == 0 ? p.k : p.k / kGemmBlockK * kGemmBlockK;
  const int64_t rest = p.k - whole_k;
  if (rest > 0) pack_a<D>(p, 0, static_cast<int>(p.m), whole_k, rest, padded<D>(rest), x_panels);
  // Four columns: sums over all of k.
  const auto add_columns = [&](int64_t n, int cols, float* acc) {
    for (int64_t k0 = 0; k0 < whole_k; k0 += kGemmBlockK) {
      const int64_t kc = whole_k - k0 < kGemmBlockK ? whole_k - k0 : kGemmBlockK;
      const int steps = static_cast<int>(kc / D::kStep);
      if (cols == 4 && p.b_type == GemmType::kBf16) {
        rows_tiles<D, T>(p, k0, steps, rows_b<D, uint16_t>(p, n, k0), acc);
        continue;
      }
      if constexpr (D::kFromF32) {
        if (cols == 4 && p.b_type == GemmType::kF32) {
          rows_tiles<D, T>(p, k0, steps, rows_b<D, float>(p, n, k0), acc);
          continue;
        }
      }
      pack_b<D>(p, n, cols, k0, kc, kc, w_panel);
      rows_tiles<D, T>(p, k0, steps, PanelB<D>{w_panel}, acc);
    }
    if (rest > 0) {
      pack_b<D>(p, n, cols, whole_k, rest, padded<D>(rest), w_panel);
      packed_tiles<D>(p.m, x_panels, padded<D>(rest), PanelB<D>{w_panel}, acc);
    }
  };
  alignas(64) float acc[kGemmMaxRowsM * kRowsCols];
  for (int64_t n = n0; n < n1; n += kRowsCols) {
    const int cols = static_cast<int>(n1 - n < kRowsCols ? n1 - n : kRowsCols);
    std::memset(acc, 0, p.m * kRowsCols * sizeof(float));
    for (int j = 0; j < cols; j += 4) add_columns(n + j, cols - j < 4 ? cols - j : 4, acc + j);
    for (int64_t i = 0; i < p.m; ++i) store_row(p, i, n, cols, acc + i * kRowsCols);
  }
}

template <class D>
void gemm_rows(const GemmProblem& p, int64_t n0, int64_t n1) {
  if (p.a_type == GemmType::kBf16) {
    gemm_rows_of<D, uint16_t>(p, n0, n1);
  } else if constexpr (D::kFromF32) {
    gemm_rows_of<D, float>(p, n0, n1);
  }
}

template <class D>
constexpr GemmKernel make_gemm_kernel() {
  return {gemm_block<D>, gemm_rows<D>};
}

}  // namespace
}  // namespace m3
