// The inner loops of the MSA operators on the CPU, one table per instruction set, chosen at run time.
//
// Everything is a product of row tiles with packed panels:
//   A rows   query vectors (or softmax weights): `steps` words of 4 bytes each
//   B panel  kPanel columns: [steps][panel] words, so that one step is one contiguous line
// A word is one fp32 value, or, in the bf16 table, a pair of neighbouring bf16 values along the summed
// axis. Each element of a product is summed by one fixed sequence of multiply-adds (steps ascending),
// whatever the tile it lies in: results depend on nothing but the two vectors.
#pragma once
#include <cstdint>

#include "tensor/dtype.h"

namespace m3 {

constexpr int kMsaTileKeys = 128;   // keys packed at once, at most
constexpr int kMsaBatchRows = 96;   // rows of one call of attend_rows, at most (16 tiles of 6)
constexpr int kMsaMaxDim = 1024;    // MsaGeometry::check
constexpr int kMsaMaxPanel = 64, kMsaMaxLanes = 16;  // of all tables: workspaces do not depend on the table in use
extern const uint32_t kMsaZeroRow[kMsaMaxDim];  // stands for a key that must not be seen

// Memory that will be wanted next. Where few rows meet each key the work is bound by memory, and kernels prefetch
// this evenly while they compute. Default: nothing.
struct MsaAhead {
  const char* at = nullptr;
  int64_t bytes = 0;
};

// Rows that a tile of keys is applied to, with their running softmax state (m in units of log2).
struct MsaAttendTile {
  int num_rows;                  // 1 .. kMsaBatchRows
  const int32_t* row_ids;        // [num_rows] rows of the arrays below
  const uint32_t* q;             // [rows, steps(dim)]
  float* o;                      // [rows, dim_padded], not yet divided by l
  float* m;                      // [rows] running maximum of scale_log2 * q.k, -inf at the start
  float* l;                      // [rows] running sum of 2^(.. - m)
  // Visible keys of each row: j < last and (j >= first or j < sink). Absent: all.
  const int32_t *first, *last, *sink;
  int num_keys;                  // keys used: >= every `last`
  int packed_keys;               // keys that were packed
  const uint32_t *keys, *values; // packed
  int dim;
  double scale_log2;             // logit scale * log2(e)
  MsaAhead ahead_keys, ahead_values;  // of the next tile
  float* scores;                 // [kMsaBatchRows, kMsaTileKeys] scratch
  uint32_t* weights;             // the same size, other memory
};

struct MsaKernels {
  const char* name;
  int panel;      // columns of a packed panel
  bool bf16_dot;  // words are bf16 pairs

  int steps(int dim) const { return bf16_dot ? (dim + 1) / 2 : dim; }
  int padded(int columns) const { return (columns + panel - 1) / panel * panel; }

  // A vector of `dim` elements as a row of A. dtype f32 or bf16 (bf16 only in the bf16 table).
  void (*pack_row)(const void* row, int dim, DType dtype, uint32_t* a);
  // Panels of keys as columns: [padded(num_keys) / panel][steps(dim)][panel]. num_keys <= kMsaTileKeys.
  void (*pack_keys)(const void* const* rows, int num_keys, int dim, DType dtype, uint32_t* b, MsaAhead ahead);
  // Panels of channels as columns: [padded(dim) / panel][steps(num_keys)][panel].
  void (*pack_values)(const void* const* rows, int num_keys, int dim, DType dtype, uint32_t* b);

  // best[i] = max(best[i], max over keys j < last[i] of a[i] . b[j]); NaN products do not count.
  // last absent: all num_keys. lanes: scratch, kMsaMaxLanes per row.
  void (*score_max)(const uint32_t* a, int num_rows, int steps, const uint32_t* b, int num_keys, const int32_t* last,
                    float* lanes, float* best, MsaAhead ahead);
  // The same from bf16 keys of an even dim that stay bf16 pairs in the panels, [padded(num_keys) / panel][dim / 2][panel], and
  // are widened in registers: half the bytes to write and read, worth it where few rows meet a key. Same bits.
  // Absent in the bf16 table, whose words are pairs anyway.
  void (*pack_key_pairs)(const void* const* rows, int num_keys, int dim, uint32_t* b, MsaAhead ahead);
  void (*score_max_pairs)(const uint32_t* a, int num_rows, int steps, const uint32_t* b, int num_keys, const int32_t* last,
                          float* lanes, float* best, MsaAhead ahead);
  // out[j] = sum over rows i (ascending) of w[i] * max(a[i] . b[j], 0), a NaN product stays NaN.
  // out has padded(num_keys) elements; scratch kMsaBatchRows x padded(num_keys).
  void (*score_relu)(const uint32_t* a, int num_rows, int steps, const uint32_t* b, int num_keys, const float* w,
                     float* scratch, float* out);
  void (*attend_rows)(const MsaAttendTile& tile);
};

// The table of cpu_isa(). bf16_dot: products of bf16 pairs where the CPU is fast at them.
const MsaKernels& msa_kernels(bool bf16_dot);

extern const MsaKernels kMsaKernelsPortable, kMsaKernelsAvx2, kMsaKernelsAvx512, kMsaKernelsAvx512Bf16;

}  // namespace m3
