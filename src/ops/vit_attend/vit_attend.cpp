// Tiles of 384 queries x 64 keys with a running maximum and sum per query. Scores are kept in base 2: the scale takes
// up log2(e).
#include "ops/vit_attend/vit_attend.h"

#include <cmath>
#include <limits>

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/msa_workers.h"
#include "ops/common/tile_gemm.h"
#include "ops/vit_attend/vit_attend_kernel.h"
#include "ops/vit_attend/vit_tiles.h"

namespace m3 {
namespace {

// The scratch of one worker, in floats.
struct Space {
  float *q, *keys, *values, *scores, *out;
  static int64_t floats(int64_t D) {
    const int64_t padded = tile_round_up(D);
    return kVitRows * D + kVitKeys * D + kVitKeys * padded + kVitRows * kVitKeys + kVitRows * padded;
  }
  Space(float* base, int64_t D) {
    const int64_t padded = tile_round_up(D);
    q = base;
    keys = q + kVitRows * D;
    values = keys + kVitKeys * D;
    scores = values + kVitKeys * padded;
    out = scores + kVitRows * kVitKeys;
  }
};

VitSoftmax softmax_kernel() {
  const CpuIsa isa = cpu_isa();
  return isa >= CpuIsa::kAvx512 ? vit_softmax_avx512 : isa >= CpuIsa::kAvx2 ? vit_softmax_avx2 : vit_softmax_portable;
}

struct Attention {
  const Tensor &q, &k, &v;
  float scale;
  const Tensor &o, &lse;
  VitSoftmax softmax = softmax_kernel();
  const TileKernels& tiles = tile_kernels();

  // Scores of all rows against keys first .. first + count, then their share of the output.
  void add_tile(const VitItem& item, int64_t first, int64_t count, const Space& space, VitRow* rows) const {
    const int64_t D = q.dim(2), H = q.dim(1), padded_D = tile_round_up(D), padded = tile_round_up(count);
    const int64_t bytes = dtype_bytes(k.dtype());
    for (int64_t j = 0; j < padded; ++j) {  // columns beyond the last repeat it; their probability is set to 0
      const int64_t at = ((first + std::min(j, count - 1)) * H + item.head) * D * bytes;
      tile_pack_column(static_cast<const char*>(k.data()) + at, k.dtype(), j, D, space.keys, kTilePanel * D);
      tile_pack_row(static_cast<const char*>(v.data()) + at, v.dtype(), j, D, space.values, kTilePanel * kVitKeys);
    }
    tiles.gemm({item.rows(), count, D, space.q, D, 1, space.keys, kTilePanel * D, space.scores, kVitKeys, false});
    for (int64_t i = 0; i < item.rows(); ++i) {
      const float rescale = softmax(space.scores + i * kVitKeys, count, padded, rows + i);
      float* out = space.out + i * padded_D;
      if (rescale != 1.0f) {
        for (int64_t d = 0; d < D; ++d) out[d] *= rescale;
      }
    }
    tiles.gemm({item.rows(), D, padded, space.scores, kVitKeys, 1, space.values, kTilePanel * kVitKeys, space.out,
                padded_D, true});
  }

  void run(const VitItem& item, const Space& space) const {
    const int64_t D = q.dim(2), H = q.dim(1), padded_D = tile_round_up(D);
    VitRow rows[kVitRows];
    for (int64_t i = 0; i < item.rows(); ++i) {
      vit_row(q, item.row + i, item.head, scale * kLog2E, space.q + i * D);
      rows[i] = {-std::numeric_limits<float>::infinity(), 0};
    }
    std::fill(space.out, space.out + item.rows() * padded_D, 0.0f);
    for (int64_t first = item.begin; first < item.end; first += kVitKeys) {
      add_tile(item, first, std::min(kVitKeys, item.end - first), space, rows);
    }
    mutable_float(o, [&](auto* out) {
      for (int64_t i = 0; i < item.rows(); ++i) {
        const int64_t at = ((item.row + i) * H + item.head) * D;
        for (int64_t d = 0; d < D; ++d) round_to(space.out[i * padded_D + d] / rows[i].sum, out + at + d);
      }
    });
    if (!lse.defined()) return;
    for (int64_t i = 0; i < item.rows(); ++i) {
      lse.ptr<float>()[(item.row + i) * H + item.head] = (rows[i].maximum + std::log2(rows[i].sum)) * kLn2;
    }
  }
};

}  // namespace

void vit_attend(const Tensor& q_THD, const Tensor& k_THD, const Tensor& v_THD, std::span<const int32_t> cu_segments,
                float scale, const Tensor& o_THD, const Tensor& lse_TH, Arena& scratch, Stream) {
  M3_CHECK(q_THD.rank() == 3 && q_THD.dim(2) > 0, "q_THD must be [T, H, D > 0], got {}", q_THD.shape().str());
  check_float("q_THD", q_THD);
  check_float("k_THD", k_THD, q_THD.shape());
  check_float("v_THD", v_THD, q_THD.shape());
  check_float("o_THD", o_THD, q_THD.shape());
  if (lse_TH.defined()) check_shape("lse_TH", lse_TH, {q_THD.dim(0), q_THD.dim(1)});
  const std::vector<VitItem> items = vit_items(cu_segments, q_THD.dim(0), q_THD.dim(1), kVitRows);
  const ArenaScope scope(scratch);
  const int64_t floats = Space::floats(q_THD.dim(2));
  float* space = scratch.alloc("vision attention", DType::kF32, {num_threads(), floats}).ptr<float>();
  const Attention attention = {q_THD, k_THD, v_THD, scale, o_THD, lse_TH};
  msa_for_each_item(static_cast<int64_t>(items.size()), num_threads(), [&](int64_t i, int worker) {
    attention.run(items[i], Space(space + worker * floats, q_THD.dim(2)));
  });
}

int64_t vit_attend_scratch_bytes(int64_t, int64_t, int64_t head_dim) {
  return num_threads() * Space::floats(head_dim) * 4 + Arena::kAlignment;
}

}  // namespace m3
