// Two passes, so that every sum has one owner and a fixed order: rows of queries gather dq over tiles of keys, rows
// of keys gather dk and dv over tiles of queries. Both compute the same two products per tile,
//   scores = rows · columnsᵀ      gradients = rows' · columns'ᵀ
// with (rows, rows') = (q, do), (columns, columns') = (k, v) in the first pass and the other way round in the second.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/msa_workers.h"
#include "ops/common/rows.h"
#include "ops/common/tile_gemm.h"
#include "ops/vit_attend/vit_attend.h"
#include "ops/vit_attend/vit_attend_kernel.h"
#include "ops/vit_attend/vit_tiles.h"

namespace m3 {
namespace {

constexpr int64_t kColumns = kVitKeys;

// The scratch of one worker, in floats.
struct Space {
  float *rows, *rows2;        // [kVitBackwardRows, D]
  float *columns, *columns2;  // packed, [D] x kColumns
  float *values, *values2;    // the same columns packed the other way, kColumns x [D]
  float *scores, *gradients;  // [kVitBackwardRows, kColumns]
  float *sum, *sum2;          // [kVitBackwardRows, D padded]
  float *lse, *delta;         // [kColumns] of the tile
  static Space carve(float* base, int64_t D, int64_t* floats) {
    MsaCarver carver(base);
    const int64_t padded = tile_round_up(D);
    Space s;
    for (float** p : {&s.rows, &s.rows2}) *p = carver.take<float>(kVitBackwardRows * D);
    for (float** p : {&s.columns, &s.columns2}) *p = carver.take<float>(kColumns * D);
    for (float** p : {&s.values, &s.values2}) *p = carver.take<float>(kColumns * padded);
    for (float** p : {&s.scores, &s.gradients}) *p = carver.take<float>(kVitBackwardRows * kColumns);
    for (float** p : {&s.sum, &s.sum2}) *p = carver.take<float>(kVitBackwardRows * padded);
    for (float** p : {&s.lse, &s.delta}) *p = carver.take<float>(kColumns);
    *floats = carver.bytes() / 4;
    return s;
  }
};

VitGradient gradient_kernel() {
  const CpuIsa isa = cpu_isa();
  return isa >= CpuIsa::kAvx512 ? vit_gradient_avx512 : isa >= CpuIsa::kAvx2 ? vit_gradient_avx2 : vit_gradient_portable;
}

struct Backward {
  const Tensor &q, &k, &v, &o, &lse, &d_o;
  float scale;
  const Tensor &dq, &dk, &dv;
  const float* lse2_HT;   // base 2, by head
  const float* delta_HT;  // Σ_d do · o
  VitGradient gradient = gradient_kernel();
  const TileKernels& tiles = tile_kernels();
  int64_t T = q.dim(0), H = q.dim(1), D = q.dim(2), padded_D = tile_round_up(D);

  const char* row_of(const Tensor& t, int64_t token, int64_t head) const {
    return static_cast<const char*>(t.data()) + (token * H + head) * D * dtype_bytes(t.dtype());
  }

  // Packs columns first .. first + count of (x, x2); the last is repeated up to a full panel.
  void pack_columns(const Tensor& x, const Tensor& x2, int64_t head, int64_t first, int64_t count,
                    const Space& s) const {
    for (int64_t j = 0; j < tile_round_up(count); ++j) {
      const int64_t token = first + std::min(j, count - 1);
      tile_pack_column(row_of(x, token, head), x.dtype(), j, D, s.columns, kTilePanel * D);
      tile_pack_column(row_of(x2, token, head), x2.dtype(), j, D, s.columns2, kTilePanel * D);
      tile_pack_row(row_of(x, token, head), x.dtype(), j, D, s.values, kTilePanel * kColumns);
      tile_pack_row(row_of(x2, token, head), x2.dtype(), j, D, s.values2, kTilePanel * kColumns);
    }
  }

  void load_rows(const Tensor& x, float factor, const Tensor& x2, const VitItem& item, const Space& s) const {
    for (int64_t i = 0; i < item.rows(); ++i) {
      vit_row(x, item.row + i, item.head, factor, s.rows + i * D);
      vit_row(x2, item.row + i, item.head, 1, s.rows2 + i * D);
    }
    std::fill(s.sum, s.sum + item.rows() * padded_D, 0.0f);
    std::fill(s.sum2, s.sum2 + item.rows() * padded_D, 0.0f);
  }

  void products(const VitItem& item, int64_t count, const Space& s) const {
    tiles.gemm({item.rows(), count, D, s.rows, D, 1, s.columns, kTilePanel * D, s.scores, kColumns, false});
    tiles.gemm({item.rows(), count, D, s.rows2, D, 1, s.columns2, kTilePanel * D, s.gradients, kColumns, false});
  }

  // sum += weights · values
  void gather(const VitItem& item, int64_t count, const float* weights, const float* values, float* sum) const {
    tiles.gemm({item.rows(), D, tile_round_up(count), weights, kColumns, 1, values, kTilePanel * kColumns, sum,
                padded_D, true});
  }

  void store(const VitItem& item, const float* sum, float factor, const Tensor& out) const {
    mutable_float(out, [&](auto* to) {
      for (int64_t i = 0; i < item.rows(); ++i) {
        const int64_t at = ((item.row + i) * H + item.head) * D;
        for (int64_t d = 0; d < D; ++d) round_to(sum[i * padded_D + d] * factor, to + at + d);
      }
    });
  }

  void queries(const VitItem& item, const Space& s) const {
    load_rows(q, scale * kLog2E, d_o, item, s);
    for (int64_t first = item.begin; first < item.end; first += kColumns) {
      const int64_t count = std::min(kColumns, item.end - first);
      pack_columns(k, v, item.head, first, count, s);
      products(item, count, s);
      for (int64_t i = 0; i < item.rows(); ++i) {
        const int64_t at = item.head * T + item.row + i;
        gradient(s.scores + i * kColumns, s.gradients + i * kColumns, count, tile_round_up(count), lse2_HT + at,
                 delta_HT + at, true);
      }
      gather(item, count, s.gradients, s.values, s.sum);
    }
    store(item, s.sum, scale, dq);
  }

  void keys(const VitItem& item, const Space& s) const {
    load_rows(k, scale * kLog2E, v, item, s);
    for (int64_t first = item.begin; first < item.end; first += kColumns) {
      const int64_t count = std::min(kColumns, item.end - first);
      pack_columns(q, d_o, item.head, first, count, s);
      products(item, count, s);
      std::fill(s.lse, s.lse + kColumns, 0.0f);
      std::fill(s.delta, s.delta + kColumns, 0.0f);
      std::copy_n(lse2_HT + item.head * T + first, count, s.lse);
      std::copy_n(delta_HT + item.head * T + first, count, s.delta);
      for (int64_t j = 0; j < item.rows(); ++j) {
        gradient(s.scores + j * kColumns, s.gradients + j * kColumns, count, tile_round_up(count), s.lse, s.delta,
                 false);
      }
      gather(item, count, s.gradients, s.values, s.sum);
      gather(item, count, s.scores, s.values2, s.sum2);
    }
    store(item, s.sum, scale, dk);
    store(item, s.sum2, 1, dv);
  }
};

// Row statistics by head: lse in base 2 and Σ_d do · o.
void row_statistics(const Tensor& o, const Tensor& lse, const Tensor& d_o, float* lse2_HT, float* delta_HT) {
  const int64_t T = o.dim(0), H = o.dim(1), D = o.dim(2);
  parallel_rows(T, H * D, [&](int64_t begin, int64_t end) {
    std::vector<float> out(D), gradient(D);
    for (int64_t row = begin * H; row < end * H; ++row) {
      vit_row(o, row / H, row % H, 1, out.data());
      vit_row(d_o, row / H, row % H, 1, gradient.data());
      float delta = 0;
      for (int64_t d = 0; d < D; ++d) delta += out[d] * gradient[d];
      const int64_t at = row % H * T + row / H;
      delta_HT[at] = delta;
      lse2_HT[at] = lse.ptr<float>()[row] * kLog2E;
    }
  });
}

}  // namespace

void vit_attend_backward(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD, const Tensor& o_THD,
                         const Tensor& lse_TH, const Tensor& do_THD, std::span<const int32_t> cu_segments, float scale,
                         const Tensor& dq_THD, const Tensor& dk_THD, const Tensor& dv_THD, Arena& scratch, Stream) {
  M3_CHECK(q_THD.rank() == 3 && q_THD.dim(2) > 0, "q_THD must be [T, H, D > 0], got {}", q_THD.shape().str());
  const int64_t T = q_THD.dim(0), H = q_THD.dim(1), D = q_THD.dim(2);
  check_float("q_THD", q_THD);
  for (auto [name, tensor] : {std::pair<const char*, const Tensor*>{"k_THD", &k_THD}, {"v_THD", &v_THD},
                              {"o_THD", &o_THD}, {"do_THD", &do_THD}, {"dq_THD", &dq_THD}, {"dk_THD", &dk_THD},
                              {"dv_THD", &dv_THD}}) {
    check_float(name, *tensor, q_THD.shape());
  }
  check_shape("lse_TH", lse_TH, {T, H});
  const std::vector<VitItem> items = vit_items(cu_segments, T, H, kVitBackwardRows);
  const ArenaScope scope(scratch);
  float* lse2_HT = scratch.alloc("vision attention lse", DType::kF32, {H, T}).ptr<float>();
  float* delta_HT = scratch.alloc("vision attention delta", DType::kF32, {H, T}).ptr<float>();
  row_statistics(o_THD, lse_TH, do_THD, lse2_HT, delta_HT);
  int64_t floats = 0;
  Space::carve(nullptr, D, &floats);
  float* space = scratch.alloc("vision attention backward", DType::kF32, {num_threads(), floats}).ptr<float>();
  const Backward backward = {q_THD, k_THD, v_THD, o_THD, lse_TH, do_THD, scale, dq_THD, dk_THD, dv_THD, lse2_HT, delta_HT};
  const int64_t count = static_cast<int64_t>(items.size());
  msa_for_each_item(2 * count, num_threads(), [&](int64_t i, int worker) {
    int64_t size = 0;
    const Space s = Space::carve(space + worker * floats, D, &size);
    if (i < count) {
      backward.keys(items[i], s);
    } else {
      backward.queries(items[i - count], s);
    }
  });
}

int64_t vit_attend_backward_scratch_bytes(int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  int64_t floats = 0;
  Space::carve(nullptr, head_dim, &floats);
  return num_threads() * floats * 4 + 2 * num_tokens * num_heads * 4 + 3 * Arena::kAlignment;
}

}  // namespace m3
