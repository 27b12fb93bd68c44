// The bodies of MsaKernels, written once for every instruction set. Included by the kernel files
// msa_kernels_*.cpp alone, which say what a word is (M3_KERNELS_BF16_DOT) and make the table.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/common/msa_kernels.h"
#include "ops/common/simd.h"

namespace m3 {
namespace {

using V = Simd;
constexpr bool kBf16Dot = M3_KERNELS_BF16_DOT;
constexpr int kLanes = V::kLanes, kTileRows = V::kTileRows, kTileVecs = V::kTileVecs;
constexpr int kPanel = kLanes * kTileVecs;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

inline int num_steps(int dim) { return kBf16Dot ? (dim + 1) / 2 : dim; }

// acc + a * b, one word wide: broadcast word of A against a vector of B.
[[gnu::always_inline]] inline V::Vec multiply_add(V::Vec acc, const uint32_t* a, V::Words b) {
#if M3_KERNELS_BF16_DOT
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*a))),
                          reinterpret_cast<__m512bh>(b));
#else
  float x;
  std::memcpy(&x, a, sizeof(x));
  return V::fma(V::set1(x), V::as_floats(b), acc);
#endif
}

// MsaAhead in portions: one at every step of a loop of `num_steps`.
struct Prefetcher {
  const char *at, *end;
  int64_t bytes_per_step;

  Prefetcher(MsaAhead ahead, int64_t num_steps)
      : at(ahead.at), end(ahead.at + ahead.bytes), bytes_per_step(ahead.bytes / (num_steps > 0 ? num_steps : 1) + 1) {}
  // Up to kLines lines.
  template <int kLines>
  [[gnu::always_inline]] void step() {
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(at + bytes_per_step * i / kLines);
    at += bytes_per_step;
  }
};
constexpr int kLinesPerStep = kLanes == 16 ? 2 : 1;  // of a multiplication

// acc[r][v] += sum over steps of a[r][step] * b[step][v]: the register tile all work goes through.
template <int kRows, bool kAhead>
[[gnu::always_inline]] inline void multiply_tile(const uint32_t* const* a, const uint32_t* b, int steps,
                                                 V::Vec (&acc)[kRows][kTileVecs], Prefetcher& prefetcher) {
  const uint32_t* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = a[r];
  for (int s = 0; s < steps; ++s) {
    V::Words column[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) column[v] = V::load_words(b + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTileVecs; ++v) acc[r][v] = multiply_add(acc[r][v], row[r] + s, column[v]);
    }
    b += kPanel;
    if (kAhead) prefetcher.template step<kLinesPerStep>();
  }
}

#if !M3_KERNELS_BF16_DOT
// multiply_tile for panels of bf16 pairs: step 2s takes the low halves, step 2s + 1 the high ones, so that every sum has
// the same order of multiply-adds as over widened panels.
template <int kRows, bool kAhead>
[[gnu::always_inline]] inline void multiply_tile_pairs(const uint32_t* const* a, const uint32_t* b, int steps,
                                                       V::Vec (&acc)[kRows][kTileVecs], Prefetcher& prefetcher) {
  const uint32_t* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = a[r];
  for (int s = 0; s < steps; s += 2) {
    V::Words low[kTileVecs], high[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) {
      const V::Words pair = V::load_words(b + v * kLanes);
      low[v] = V::shift_left_16(pair);
      high[v] = V::high_halves(pair);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTileVecs; ++v) acc[r][v] = multiply_add(acc[r][v], row[r] + s, low[v]);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTileVecs; ++v) acc[r][v] = multiply_add(acc[r][v], row[r] + s + 1, high[v]);
    }
    b += kPanel;
    if (kAhead) prefetcher.template step<2 * kLinesPerStep>();
  }
}
#endif

inline int num_row_tiles(int num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }

// Calls body.operator()<rows>(first row) for tiles of kTileRows rows and one smaller tile at the end.
template <typename Body>
[[gnu::always_inline]] inline void for_row_tiles(int num_rows, const Body& body) {
  int i = 0;
  for (; i + kTileRows <= num_rows; i += kTileRows) body.template operator()<kTileRows>(i);
  switch (num_rows - i) {
    case 1: body.template operator()<1>(i); break;
    case 2: body.template operator()<2>(i); break;
    case 3: body.template operator()<3>(i); break;
    case 4: if constexpr (kTileRows > 4) body.template operator()<4>(i); break;
    case 5: if constexpr (kTileRows > 5) body.template operator()<5>(i); break;
    default: break;
  }
}

template <int kRows>
[[gnu::always_inline]] inline void clear(V::Vec (&acc)[kRows][kTileVecs]) {
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kTileVecs; ++v) acc[r][v] = V::zero();
  }
}

// ---------------------------------------------------------------------------------------------- packing

inline float widened(const void* row, DType dtype, int c) {
  return dtype == DType::kBF16 ? to_float(static_cast<const bf16*>(row)[c]) : static_cast<const float*>(row)[c];
}

// The word of step s of a row: one fp32 value or a pair of bf16 values, 0 beyond dim.
inline uint32_t word_of(const void* row, DType dtype, int dim, int s) {
  uint32_t word = 0;
  if (kBf16Dot) {
    const int count = dim - 2 * s < 2 ? dim - 2 * s : 2;
    std::memcpy(&word, static_cast<const uint16_t*>(row) + 2 * s, 2 * count);
  } else {
    const float x = widened(row, dtype, s);
    std::memcpy(&word, &x, sizeof(word));
  }
  return word;
}

// One row, from whole words or vectors where it holds any, the rest word by word.
void pack_row(const void* row, int dim, DType dtype, uint32_t* a) {
  int s = 0;
  if (kBf16Dot || dtype == DType::kF32) {
    s = kBf16Dot ? dim / 2 : dim;
    std::memcpy(a, row, sizeof(uint32_t) * s);
  } else {
    for (; s + kLanes <= dim; s += kLanes) {
      V::store_words(a + s, V::shift_left_16(V::load_halves(static_cast<const uint16_t*>(row) + s)));
    }
  }
  for (; s < num_steps(dim); ++s) a[s] = word_of(row, dtype, dim, s);
}

// kLanes keys, as the lanes [0, kLanes) of [steps][kPanel]. A 32-bit transpose moves the whole words of a row; where bf16
// values become fp32 (kSplit), a word gives two steps: its low and its high half. Returns how many steps are filled.
template <bool kSplit>
inline int pack_key_words(const void* const* rows, int words, uint32_t* b, Prefetcher& prefetcher) {
  int w = 0;
  for (; w + kLanes <= words; w += kLanes) {
    V::Words x[kLanes];
    V::load_transposed(rows, w, x);
    if (prefetcher.at < prefetcher.end) prefetcher.step<kLanes / 2>();
    for (int i = 0; i < kLanes; ++i) {
      if (kSplit) {
        V::store_words(b + int64_t{2 * (w + i)} * kPanel, V::shift_left_16(x[i]));
        V::store_words(b + int64_t{2 * (w + i) + 1} * kPanel, V::high_halves(x[i]));
      } else {
        V::store_words(b + int64_t{w + i} * kPanel, x[i]);
      }
    }
  }
  return kSplit ? 2 * w : w;
}

// The value that a word (or one half of a bf16 pair) stands for.
inline double word_value(uint32_t word, int half) {
  if (kBf16Dot) word = half == 0 ? word << 16 : word & 0xffff0000u;
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

// Calls pack(kLanes row pointers, where their lanes begin in b) for all panels; missing keys are rows of zeros.
template <typename Pack>
inline void for_key_lanes(const void* const* rows, int num_keys, int panel_steps, uint32_t* b, const Pack& pack) {
  for (int j = 0; j < num_keys; j += kPanel, b += int64_t{panel_steps} * kPanel) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      const void* group[kLanes];
      for (int i = 0; i < kLanes; ++i) group[i] = j + lane + i < num_keys ? rows[j + lane + i] : kMsaZeroRow;
      pack(group, b + lane);
    }
  }
}

inline Prefetcher packing_prefetcher(MsaAhead ahead, int num_keys, int words) {
  return Prefetcher(ahead, int64_t{(num_keys + kPanel - 1) / kPanel} * kTileVecs * (words / kLanes));
}

void pack_keys(const void* const* rows, int num_keys, int dim, DType dtype, uint32_t* b, MsaAhead ahead) {
  const int words = dtype == DType::kBF16 ? dim / 2 : dim;
  const bool split = !kBf16Dot && dtype == DType::kBF16;
  Prefetcher prefetcher = packing_prefetcher(ahead, num_keys, words);
  for_key_lanes(rows, num_keys, num_steps(dim), b, [&](const void* const* group, uint32_t* lanes) {
    int s = split ? pack_key_words<true>(group, words, lanes, prefetcher) : pack_key_words<false>(group, words, lanes, prefetcher);
    for (; s < num_steps(dim); ++s) {
      for (int i = 0; i < kLanes; ++i) lanes[int64_t{s} * kPanel + i] = word_of(group[i], dtype, dim, s);
    }
  });
}

#if !M3_KERNELS_BF16_DOT
void pack_key_pairs(const void* const* rows, int num_keys, int dim, uint32_t* b, MsaAhead ahead) {
  const int words = dim / 2;
  Prefetcher prefetcher = packing_prefetcher(ahead, num_keys, words);
  for_key_lanes(rows, num_keys, words, b, [&](const void* const* group, uint32_t* lanes) {
    for (int s = pack_key_words<false>(group, words, lanes, prefetcher); s < words; ++s) {
      for (int i = 0; i < kLanes; ++i) std::memcpy(lanes + int64_t{s} * kPanel + i, static_cast<const uint32_t*>(group[i]) + s, 4);
    }
  });
}
#endif

// Channels [c, c + kLanes) of the keys of one step: of one key, or of two keys as bf16 pairs.
template <DType kDtype>
[[gnu::always_inline]] inline V::Words value_words(const void* first, const void* second, int c) {
  if constexpr (kDtype == DType::kF32) return V::load_words(static_cast<const float*>(first) + c);
  const V::Words low = V::load_halves(static_cast<const uint16_t*>(first) + c);
  if constexpr (!kBf16Dot) return V::shift_left_16(low);
  return V::either_words(low, V::shift_left_16(V::load_halves(static_cast<const uint16_t*>(second) + c)));
}

// The word of channel c of the keys of step s.
inline uint32_t value_word(const void* first, const void* second, DType dtype, int dim, int c) {
  if (!kBf16Dot) return word_of(first, dtype, dim, c);
  return static_cast<const uint16_t*>(first)[c] | uint32_t{static_cast<const uint16_t*>(second)[c]} << 16;
}

template <DType kDtype>
void pack_values_of(const void* const* rows, int num_keys, int dim, uint32_t* b) {
  const int steps = num_steps(num_keys);
  for (int panel = 0; panel < dim; panel += kPanel) {
    const int vectors = dim - panel >= kPanel ? kTileVecs : (dim - panel) / kLanes;
    for (int s = 0; s < steps; ++s, b += kPanel) {
      const void* first = rows[kBf16Dot ? 2 * s : s];
      const void* second = kBf16Dot && 2 * s + 1 < num_keys ? rows[2 * s + 1] : kMsaZeroRow;
      if (vectors == kTileVecs) {
        for (int v = 0; v < kTileVecs; ++v) {
          V::store_words(b + v * kLanes, value_words<kDtype>(first, second, panel + v * kLanes));
        }
        continue;
      }
      for (int v = 0; v < vectors; ++v) V::store_words(b + v * kLanes, value_words<kDtype>(first, second, panel + v * kLanes));
      for (int i = vectors * kLanes; i < kPanel; ++i) {  // channels that do not fill a vector, and beyond dim
        b[i] = panel + i < dim ? value_word(first, second, kDtype, dim, panel + i) : 0;
      }
    }
  }
}

void pack_values(const void* const* rows, int num_keys, int dim, DType dtype, uint32_t* b) {
  if (dtype == DType::kF32) {
    pack_values_of<DType::kF32>(rows, num_keys, dim, b);
  } else {
    pack_values_of<DType::kBF16>(rows, num_keys, dim, b);
  }
}

// ----------------------------------------------------------------------------------------- index scores

// Maxima are kept per lane in `lanes` while the panels pass, and reduced once at the end.
template <bool kAhead, bool kPairs>
void block_max(const uint32_t* a, int num_rows, int steps, const uint32_t* b, int num_keys, const int32_t* last,
               float* lanes, float* best, MsaAhead ahead) {
  const V::Vec lane = lane_numbers(), lowest = V::set1(kNegInf);
  const int panel_steps = kPairs ? steps / 2 : steps;
  Prefetcher prefetcher(ahead, int64_t{(num_keys + kPanel - 1) / kPanel} * num_row_tiles(num_rows) * panel_steps);
  for (int i = 0; i < num_rows; ++i) V::store(lanes + i * kLanes, lowest);
  for (int j = 0; j < num_keys; j += kPanel, b += int64_t{panel_steps} * kPanel) {
    for_row_tiles(num_rows, [&]<int kRows>(int i) {
      const uint32_t* rows[kRows];
      int least = num_keys;
      for (int r = 0; r < kRows; ++r) {
        rows[r] = a + int64_t{i + r} * steps;
        if (last != nullptr && last[i + r] < least) least = last[i + r];
      }
      V::Vec acc[kRows][kTileVecs];
      clear<kRows>(acc);
      if constexpr (kPairs) {
        multiply_tile_pairs<kRows, kAhead>(rows, b, steps, acc, prefetcher);
      } else {
        multiply_tile<kRows, kAhead>(rows, b, steps, acc, prefetcher);
      }
      if (least < j + kPanel) {
        for (int r = 0; r < kRows; ++r) {
          const int limit = (last != nullptr ? last[i + r] : num_keys) - j;
          for (int v = 0; v < kTileVecs; ++v) {
            acc[r][v] = V::select(V::less(lane, V::set1(static_cast<float>(limit - v * kLanes))), acc[r][v], lowest);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        V::Vec top = V::load(lanes + (i + r) * kLanes);
#pragma GCC unroll 8
        for (int v = 0; v < kTileVecs; ++v) top = V::max(acc[r][v], top);  // a NaN product leaves top as it is
        V::store(lanes + (i + r) * kLanes, top);
      }
    });
  }
  for (int i = 0; i < num_rows; ++i) {
    const float top = reduce_max(V::load(lanes + i * kLanes));
    if (top > best[i]) best[i] = top;
  }
}

template <bool kPairs>
void score_max(const uint32_t* a, int num_rows, int steps, const uint32_t* b, int num_keys, const int32_t* last,
               float* lanes, float* best, MsaAhead ahead) {
  if (ahead.at != nullptr) {
    block_max<true, kPairs>(a, num_rows, steps, b, num_keys, last, lanes, best, ahead);
  } else {
    block_max<false, kPairs>(a, num_rows, steps, b, num_keys, last, lanes, best, ahead);
  }
}

// out[i][j] = a[i] . b[j] for whole panels; out rows lie `stride` apart.
template <bool kAhead>
void multiply_keys(const uint32_t* const* rows, int num_rows, int steps, const uint32_t* b, int num_keys,
                          float* out, int stride, MsaAhead ahead) {
  Prefetcher prefetcher(ahead, int64_t{(num_keys + kPanel - 1) / kPanel} * num_row_tiles(num_rows) * steps);
  for (int j = 0; j < num_keys; j += kPanel, b += int64_t{steps} * kPanel) {
    for_row_tiles(num_rows, [&]<int kRows>(int i) {
      V::Vec acc[kRows][kTileVecs];
      clear<kRows>(acc);
      multiply_tile<kRows, kAhead>(rows + i, b, steps, acc, prefetcher);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kTileVecs; ++v) V::store(out + int64_t{i + r} * stride + j + v * kLanes, acc[r][v]);
      }
    });
  }
}

void score_relu(const uint32_t* a, int num_rows, int steps, const uint32_t* b, int num_keys, const float* w,
                float* scratch, float* out) {
  const int stride = (num_keys + kPanel - 1) / kPanel * kPanel;
  std::memset(out, 0, sizeof(float) * stride);
  for (int begin = 0; begin < num_rows; begin += kMsaBatchRows) {
    const int count = num_rows - begin < kMsaBatchRows ? num_rows - begin : kMsaBatchRows;
    const uint32_t* rows[kMsaBatchRows];
    for (int i = 0; i < count; ++i) rows[i] = a + int64_t{begin + i} * steps;
    multiply_keys<false>(rows, count, steps, b, num_keys, scratch, stride, {});
    for (int j = 0; j < stride; j += kLanes) {
      V::Vec sum = V::load(out + j);
      for (int i = 0; i < count; ++i) {
        const V::Vec u = V::max(V::zero(), V::load(scratch + int64_t{i} * stride + j));  // NaN stays
        sum = V::fma(V::set1(w[begin + i]), u, sum);
      }
      V::store(out + j, sum);
    }
  }
}

// -------------------------------------------------------------------------------------------- attention

// Lanes of a vector that starts at key j, for one row of a masked tile.
[[gnu::always_inline]] inline V::Mask visible_lanes(const MsaAttendTile& t, int i, int j) {
  const V::Vec key = V::add(lane_numbers(), V::set1(static_cast<float>(j)));
  const V::Mask before_last = V::less(key, V::set1(static_cast<float>(t.last[i])));
  const V::Mask in_window = V::less(V::set1(static_cast<float>(t.first[i]) - 0.5f), key);
  const V::Mask in_sink = V::less(key, V::set1(static_cast<float>(t.sink[i])));
  return V::both(before_last, V::either(in_window, in_sink));
}

// Two vectors of softmax weights, kept as words of A from key j on.
[[gnu::always_inline]] inline void store_weights(uint32_t* weights, int j, V::Vec low, V::Vec high) {
#if M3_KERNELS_BF16_DOT
  V::store_words(weights + j / 2, reinterpret_cast<V::Words>(_mm512_cvtne2ps_pbh(high, low)));
#else
  V::store(reinterpret_cast<float*>(weights) + j, low);
  V::store(reinterpret_cast<float*>(weights) + j + kLanes, high);
#endif
}

// Beyond this many log2 units the rounding of a score is felt in its weight (2^8 * 2^-24 * a few): such rows are taken in
// fp64. Trained models stay far below it.
constexpr float kLargeScore = 256.0f;

// Scores of a row in fp64, for keys whose score is not -inf already: scores become score * scale - m, where m, returned,
// is the larger of old_max and the maximum, as fp32.
float exact_scores(const MsaAttendTile& t, int id, int padded_keys, float old_max, float* scores) {
  const int steps = num_steps(t.dim);
  const uint32_t* q = t.q + int64_t{id} * steps;
  double exact[kMsaTileKeys];
  double top = old_max;
  for (int j = 0; j < padded_keys; j += kPanel) {
    const uint32_t* b = t.keys + int64_t{j} * steps;
    double dot[kPanel] = {};
    for (int s = 0; s < steps; ++s, b += kPanel) {
      for (int half = 0; half < (kBf16Dot ? 2 : 1); ++half) {
        const double x = word_value(q[s], half);
        for (int lane = 0; lane < kPanel; ++lane) dot[lane] += x * word_value(b[lane], half);
      }
    }
    for (int lane = 0; lane < kPanel; ++lane) {
      exact[j + lane] = scores[j + lane] == kNegInf ? kNegInf : dot[lane] * t.scale_log2;
      if (exact[j + lane] > top) top = exact[j + lane];
    }
  }
  const float base = static_cast<float>(top);
  for (int j = 0; j < padded_keys; ++j) scores[j] = static_cast<float>(exact[j] - base);
  return base;
}

// Scores of one row become weights 2^(scale * score - m). Updates m and l; returns what the row's
// old output has to be multiplied with.
inline float softmax_row(const MsaAttendTile& t, int i, int padded_keys, float* scores, uint32_t* weights) {
  const int id = t.row_ids[i];
  const V::Vec scale = V::set1(static_cast<float>(t.scale_log2)), lowest = V::set1(kNegInf);
  const bool masked = t.last != nullptr;
  V::Vec top0 = lowest, top1 = lowest;
  for (int j = 0; j < padded_keys; j += 2 * kLanes) {
    V::Vec x0 = V::mul(V::load(scores + j), scale), x1 = V::mul(V::load(scores + j + kLanes), scale);
    if (masked) {
      x0 = V::select(visible_lanes(t, i, j), x0, lowest);
      x1 = V::select(visible_lanes(t, i, j + kLanes), x1, lowest);
    } else if (j + 2 * kLanes > t.num_keys) {
      const V::Vec end = V::set1(static_cast<float>(t.num_keys - j));
      x0 = V::select(V::less(lane_numbers(), end), x0, lowest);
      x1 = V::select(V::less(V::add(lane_numbers(), V::set1(kLanes)), end), x1, lowest);
    }
    top0 = V::max(top0, x0);
    top1 = V::max(top1, x1);
    V::store(scores + j, x0);
    V::store(scores + j + kLanes, x1);
  }
  const float old_max = t.m[id], tile_max = reduce_max(V::max(top0, top1));
  float new_max = tile_max > old_max ? tile_max : old_max;
  float base = new_max == kNegInf ? 0.0f : new_max;  // nothing visible so far: all weights are 0
  V::Vec shift = V::set1(base);
  if (std::fabs(tile_max) > kLargeScore && std::fabs(tile_max) < std::numeric_limits<float>::infinity()) {
    base = new_max = exact_scores(t, id, padded_keys, old_max, scores);
    shift = V::zero();
  }
  V::Vec sum0 = V::zero(), sum1 = V::zero();
  for (int j = 0; j < padded_keys; j += 2 * kLanes) {
    const V::Vec p0 = exp2_lanes(V::sub(V::load(scores + j), shift));
    const V::Vec p1 = exp2_lanes(V::sub(V::load(scores + j + kLanes), shift));
    sum0 = V::add(sum0, p0);
    sum1 = V::add(sum1, p1);
    store_weights(weights, j, p0, p1);
  }
  float keep[kLanes];
  V::store(keep, exp2_lanes(V::set1(old_max - base)));
  t.l[id] = t.l[id] * keep[0] + reduce_add(V::add(sum0, sum1));
  t.m[id] = new_max;
  return keep[0];
}

template <bool kAhead>
void attend_tile(const MsaAttendTile& t) {
  const int steps = num_steps(t.dim), dim_padded = (t.dim + kPanel - 1) / kPanel * kPanel;
  const int padded_keys = (t.num_keys + kPanel - 1) / kPanel * kPanel;
  constexpr int kStride = kMsaTileKeys;
  static_assert(kMsaTileKeys % kPanel == 0 && kPanel <= kMsaMaxPanel);

  // 1. scores = q . k
  const uint32_t* rows[kMsaBatchRows];
  for (int i = 0; i < t.num_rows; ++i) rows[i] = t.q + int64_t{t.row_ids[i]} * steps;
  multiply_keys<kAhead>(rows, t.num_rows, steps, t.keys, t.num_keys, t.scores, kStride, t.ahead_keys);

  // 2. weights
  float keep[kMsaBatchRows];
  for (int i = 0; i < t.num_rows; ++i) {
    const float* out = t.o + int64_t{t.row_ids[i]} * dim_padded;  // wanted in step 3, from the outer caches
    for (int c = 0; c < dim_padded; c += 16) __builtin_prefetch(out + c);
    uint32_t* weights = t.weights + int64_t{i} * kStride;
    keep[i] = softmax_row(t, i, padded_keys, t.scores + int64_t{i} * kStride, weights);
    rows[i] = weights;
  }

  // 3. o = keep * o + weights . v
  const int used_steps = num_steps(t.num_keys), packed_steps = num_steps(t.packed_keys);
  Prefetcher prefetcher(t.ahead_values, int64_t{dim_padded / kPanel} * num_row_tiles(t.num_rows) * used_steps);
  for (int c = 0; c < dim_padded; c += kPanel) {
    const uint32_t* panel = t.values + int64_t{c / kPanel} * packed_steps * kPanel;
    for_row_tiles(t.num_rows, [&]<int kRows>(int i) {
      V::Vec acc[kRows][kTileVecs];
      float* out[kRows];
      for (int r = 0; r < kRows; ++r) {
        out[r] = t.o + int64_t{t.row_ids[i + r]} * dim_padded + c;
        for (int v = 0; v < kTileVecs; ++v) acc[r][v] = V::mul(V::load(out[r] + v * kLanes), V::set1(keep[i + r]));
      }
      multiply_tile<kRows, kAhead>(rows + i, panel, used_steps, acc, prefetcher);
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kTileVecs; ++v) V::store(out[r] + v * kLanes, acc[r][v]);
      }
    });
  }
}

void attend_rows(const MsaAttendTile& t) {
  if (t.ahead_keys.at != nullptr) {
    attend_tile<true>(t);
  } else {
    attend_tile<false>(t);
  }
}

constexpr MsaKernels make_table(const char* name) {
  return {.name = name,
          .panel = kPanel,
          .bf16_dot = kBf16Dot,
          .pack_row = pack_row,
          .pack_keys = pack_keys,
          .pack_values = pack_values,
          .score_max = score_max<false>,
#if M3_KERNELS_BF16_DOT
          .pack_key_pairs = nullptr,
          .score_max_pairs = nullptr,
#else
          .pack_key_pairs = pack_key_pairs,
          .score_max_pairs = score_max<true>,
#endif
          .score_relu = score_relu,
          .attend_rows = attend_rows};
}

}  // namespace
}  // namespace m3
