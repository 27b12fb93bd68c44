// Fast CPU path: from key tile to key tile (hopper.md §6.7 has the same order on the GPU). Of a tile of 128 keys, K and V
// are packed once; the query rows that read it pass in batches of up to 128 (query, head) rows:
//
//   S = Q K^T, P = exp2(c S - lse), dP = dO V^T, dS = scale P (dP - delta)      2 products
//   dV += P^T dO, dK += dS^T Q, dQ += dS K                                      3 products
//
// 10 G D FLOP per visible (query, group, key) triple, fp32 throughout. Everything a batch touches is about 1.2 MB at D = 128:
// it lives in L2.
#include "ops/attend_backward/attend_backward.h"

#include <algorithm>
#include <cstring>

#include "base/threads.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_partials.h"
#include "ops/common/msa_walk.h"
#include "ops/common/msa_workers.h"
#include "ops/common/tile_gemm.h"

namespace m3 {
namespace {

constexpr int kBatchRows = 128;        // (query, head) rows multiplied at once, at least one query
constexpr int64_t kChunkQueries = 256; // query rows whose dq is kept in fp32 at once
constexpr float kLog2e = 1.44269504088896340736f;

int64_t batch_queries(const MsaGeometry& g) { return std::max(1, kBatchRows / g.heads_per_group); }

// Scratch of one thread, carved from the workspace.
struct Scratch {
  float *dq, *delta, *lse_log2;                 // [chunk queries, G, Dp], [chunk queries, G] x 2
  float *k_columns, *v_columns, *k_rows;        // panels of K^T and V^T [D][keys], of K [keys][D]
  float *q, *dout, *q_panels, *dout_panels;     // a batch of rows: [M, D], and as panels [M][D]
  float *p, *ds, *dq_batch;                     // [M, keys] x 2, [M, Dp]

  static int64_t carve(const MsaGeometry& g, float* base, Scratch* out) {
    const int64_t dp = tile_round_up(g.head_dim), m = batch_queries(g) * g.heads_per_group, keys = MsaWalk::kTileKeys;
    Scratch s;
    int64_t used = 0;
    const auto take = [&](float*& field, int64_t count) {
      field = base + used;
      used += tile_round_up(count);
    };
    take(s.dq, kChunkQueries * g.heads_per_group * dp);
    take(s.delta, kChunkQueries * g.heads_per_group);
    take(s.lse_log2, kChunkQueries * g.heads_per_group);
    take(s.k_columns, g.head_dim * keys);
    take(s.v_columns, g.head_dim * keys);
    take(s.k_rows, keys * dp);
    for (float** rows : {&s.q, &s.dout, &s.q_panels, &s.dout_panels, &s.dq_batch}) take(*rows, m * dp);
    take(s.p, m * keys);
    take(s.ds, m * keys);
    if (out != nullptr) *out = s;
    return used;
  }
};

// Everything one item needs.
class ItemRun {
 public:
  ItemRun(const AttendBackwardPlan& plan, const MsaBatch& batch, const AttendBackwardInputs& in, const Tensor& dq_THD,
          float* partials, float* scratch)
      : g_(plan.geometry),
        batch_(batch),
        in_(in),
        dq_THD_(dq_THD),
        partials_(partials),
        keys_("k", batch, in.k_SRD, g_.block, g_.groups, g_.head_dim),
        values_("v", batch, in.v_SRD, g_.block, g_.groups, g_.head_dim),
        walk_(plan.geometry, batch, plan.support, in.lists),
        tiles_(tile_kernels()),
        D_(g_.head_dim),
        G_(g_.heads_per_group),
        dp_(tile_round_up(g_.head_dim)) {
    Scratch::carve(g_, scratch, &s_);
  }

  void run(const MsaPiece& item) {
    item_ = &item;
    dk_ = partials_ + item.partial_begin;
    dv_ = dk_ + item.num_keys * dp_;
    std::memset(dk_, 0, sizeof(float) * 2 * item.num_keys * dp_);
    for (int64_t begin = item.q_begin; begin < item.q_end; begin += kChunkQueries) {
      chunk(begin, std::min<int64_t>(begin + kChunkQueries, item.q_end));
    }
  }

 private:
  // Row of (query, head) in the [T, H, ...] tensors.
  int64_t row(int64_t query) const {
    return (batch_.q_begin(item_->seq) + query) * g_.heads() + int64_t{item_->group} * G_;
  }
  const char* at(const Tensor& tensor, int64_t row) const {
    return static_cast<const char*>(tensor.data()) + row * D_ * dtype_bytes(tensor.dtype());
  }

  void chunk(int64_t begin, int64_t end) {
    chunk_begin_ = begin;
    const int64_t rows = (end - begin) * G_;
    std::memset(s_.dq, 0, sizeof(float) * rows * dp_);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from = row(begin) + i / G_ * g_.heads() + i % G_;
      s_.lse_log2[i] = in_.lse_TH.ptr<float>()[from] * kLog2e;
      tile_widen(at(in_.do_THD, from), in_.do_THD.dtype(), D_, s_.dout);
      tile_widen(at(in_.o_THD, from), in_.o_THD.dtype(), D_, s_.q);
      double delta = 0;  // dP - delta cancels in rows that see few keys
      for (int64_t c = 0; c < D_; ++c) delta += static_cast<double>(s_.dout[c]) * s_.q[c];
      s_.delta[i] = static_cast<float>(delta) - (in_.dlse_TH.defined() ? in_.dlse_TH.ptr<float>()[from] : 0.0f);
    }
    walk_.start(item_->seq, item_->group, begin, end);
    MsaWalk::Tile tile;
    const int64_t step = batch_queries(g_);
    while (walk_.next(tile)) {
      pack_keys(tile);
      const int64_t count = static_cast<int64_t>(tile.queries.size());
      for (int64_t first = 0; first < count; first += step) {
        rows_of_tile(tile, first, std::min(first + step, count));
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      store_row(s_.dq + i * dp_, row(begin) + i / G_ * g_.heads() + i % G_, dq_THD_);
    }
  }

  void store_row(const float* from, int64_t to_row, const Tensor& to) const {
    if (to.dtype() == DType::kF32) {
      std::memcpy(to.ptr<float>() + to_row * D_, from, sizeof(float) * D_);
    } else {
      for (int64_t c = 0; c < D_; ++c) to.ptr<bf16>()[to_row * D_ + c] = bf16(from[c]);
    }
  }

  void pack_keys(const MsaWalk::Tile& tile) {
    const int64_t padded = tile_round_up(tile.num_keys);
    if (padded != tile.num_keys) {
      std::memset(s_.k_columns, 0, sizeof(float) * D_ * padded);
      std::memset(s_.v_columns, 0, sizeof(float) * D_ * padded);
    }
    for (int j = 0; j < tile.num_keys; ++j) {
      const void* key = keys_.row(item_->seq, tile.key_begin + j, item_->group);
      const void* value = values_.row(item_->seq, tile.key_begin + j, item_->group);
      tile_pack_column(key, keys_.dtype(), j, D_, s_.k_columns, D_ * kTilePanel);
      tile_pack_column(value, values_.dtype(), j, D_, s_.v_columns, D_ * kTilePanel);
      tile_pack_row(key, keys_.dtype(), j, D_, s_.k_rows, int64_t{tile.num_keys} * kTilePanel);
    }
  }

  // Queries [first, last) of the tile's list.
  void rows_of_tile(const MsaWalk::Tile& tile, int64_t first, int64_t last) {
    // Queries ascend: keys behind the last one's position are hidden from the whole batch.
    const int64_t last_position = batch_.first_position(item_->seq) + tile.queries[last - 1];
    const int64_t m = (last - first) * G_, n = std::min<int64_t>(tile.num_keys, last_position + 1 - tile.key_begin),
                  np = tile_round_up(tile.num_keys);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t from = row(tile.queries[first + i / G_]) + i % G_;
      tile_widen(at(in_.q_THD, from), in_.q_THD.dtype(), D_, s_.q + i * D_);
      tile_widen(at(in_.do_THD, from), in_.do_THD.dtype(), D_, s_.dout + i * D_);
      tile_pack_row(s_.q + i * D_, DType::kF32, i, D_, s_.q_panels, m * kTilePanel);
      tile_pack_row(s_.dout + i * D_, DType::kF32, i, D_, s_.dout_panels, m * kTilePanel);
    }
    const int64_t column_stride = D_ * kTilePanel, row_stride = m * kTilePanel;
    tiles_.gemm({m, n, D_, s_.q, D_, 1, s_.k_columns, column_stride, s_.p, np, false});
    tiles_.gemm({m, n, D_, s_.dout, D_, 1, s_.v_columns, column_stride, s_.ds, np, false});
    softmax_gradient(tile, first, last, n, np);
    const int64_t key = tile.key_begin;
    tiles_.gemm({n, D_, m, s_.p, 1, np, s_.dout_panels, row_stride, dv_ + key * dp_, dp_, true});
    tiles_.gemm({n, D_, m, s_.ds, 1, np, s_.q_panels, row_stride, dk_ + key * dp_, dp_, true});
    tiles_.gemm({m, D_, n, s_.ds, np, 1, s_.k_rows, int64_t{tile.num_keys} * kTilePanel, s_.dq_batch, dp_, false});
    for (int64_t i = 0; i < m; ++i) {
      float* to = s_.dq + ((tile.queries[first + i / G_] - chunk_begin_) * G_ + i % G_) * dp_;
      for (int64_t c = 0; c < D_; ++c) to[c] += s_.dq_batch[i * dp_ + c];
    }
  }

  // p: S becomes P. ds: dP becomes dS. What a row does not see becomes 0 in both.
  void softmax_gradient(const MsaWalk::Tile& tile, int64_t first, int64_t last, int64_t n, int64_t np) {
    const float scale = static_cast<float>(g_.logit_scale()), to_log2 = scale * kLog2e;
    for (int64_t i = 0; i < (last - first) * G_; ++i) {
      const int32_t query = tile.queries[first + i / G_];
      float *p = s_.p + i * np, *ds = s_.ds + i * np;
      const int64_t in_chunk = (query - chunk_begin_) * G_ + i % G_;
      const float lse = s_.lse_log2[in_chunk];
      for (int64_t j = 0; j < n; ++j) p[j] = p[j] * to_log2 - lse;
      tiles_.exp2(p, p, n);
      walk_.for_hidden(tile, static_cast<int>(first + i / G_), [&](int j) { p[j] = ds[j] = 0; });
      const bool sees_this_tile_only = tile.key_begin == 0 && batch_.first_position(item_->seq) + query < tile.num_keys;
      const float delta = sees_this_tile_only ? tile_delta(p, ds, n, row(query) + i % G_) : s_.delta[in_chunk];
      for (int64_t j = 0; j < n; ++j) ds[j] = scale * (p[j] * (ds[j] - delta));
    }
  }

  // delta = sum_j P dP, as good as dP itself. Where a row sees few keys, dP - delta cancels, and dO . O would bring in the
  // rounding of O, which is bf16 in training.
  float tile_delta(const float* p, const float* dp, int64_t n, int64_t row) const {
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j < n; ++j) {
      sum += p[j];
      weighted += static_cast<double>(p[j]) * dp[j];
    }
    const float dlse = in_.dlse_TH.defined() ? in_.dlse_TH.ptr<float>()[row] : 0.0f;
    return static_cast<float>(weighted / sum) - dlse;
  }

  const MsaGeometry& g_;
  const MsaBatch& batch_;
  const AttendBackwardInputs& in_;
  const Tensor& dq_THD_;
  float* partials_;
  const MsaKeys keys_, values_;
  MsaWalk walk_;
  const TileKernels& tiles_;
  const int64_t D_, G_, dp_;
  Scratch s_;
  const MsaPiece* item_ = nullptr;
  int64_t chunk_begin_ = 0;
  float *dk_ = nullptr, *dv_ = nullptr;
};

}  // namespace

AttendBackwardPlan attend_backward_plan(const MsaGeometry& geometry, const MsaBatch& batch,
                                        const AttendSupport& support) {
  geometry.check();
  batch.check(geometry.block);
  M3_CHECK(batch.layout == KvLayout::kPacked, "attend_backward takes packed keys; a paged cache is for inference");
  AttendBackwardPlan plan;
  plan.geometry = geometry;
  plan.support = support;
  plan.num_queries = batch.num_queries;
  plan.num_keys = batch.num_seqs > 0 ? batch.cu_k[batch.num_seqs] : 0;
  plan.num_threads = num_threads();
  plan.pieces = msa_cut(batch, geometry.groups, 2 * tile_round_up(geometry.head_dim));
  plan.thread_floats = Scratch::carve(geometry, nullptr, nullptr);
  plan.workspace_bytes = static_cast<int64_t>(sizeof(float)) * (plan.pieces.partial_floats + plan.num_threads * plan.thread_floats);
  return plan;
}

void attend_backward(const AttendBackwardPlan& plan, const MsaBatch& batch, const AttendBackwardInputs& in,
                     const Tensor& dq_THD, const Tensor& dk_SRD, const Tensor& dv_SRD, void* workspace) {
  const MsaGeometry& g = plan.geometry;
  const int64_t T = plan.num_queries, S = plan.num_keys, dp = tile_round_up(g.head_dim);
  M3_CHECK(batch.num_queries == T && (batch.num_seqs > 0 ? batch.cu_k[batch.num_seqs] : 0) == S,
           "attend_backward: the plan was made for {} queries and {} keys, the batch has {}", T, S, batch.num_queries);
  const Shape queries{T, g.heads(), g.head_dim}, keys{S, g.groups, g.head_dim}, rows{T, g.heads()};
  msa_check_tensor("q_THD", in.q_THD, queries, {});
  msa_check_tensor("o_THD", in.o_THD, queries, {});
  msa_check_tensor("do_THD", in.do_THD, queries, {});
  msa_check_tensor("dq_THD", dq_THD, queries, {});
  msa_check_tensor("k_SRD", in.k_SRD, keys, {});
  msa_check_tensor("v_SRD", in.v_SRD, keys, {});
  msa_check_tensor("dk_SRD", dk_SRD, keys, {});
  msa_check_tensor("dv_SRD", dv_SRD, keys, {});
  msa_check_tensor("lse_TH", in.lse_TH, rows, {});
  if (in.dlse_TH.defined()) msa_check_tensor("dlse_TH", in.dlse_TH, rows, {});
  for (const Tensor* t : {&in.q_THD, &in.o_THD, &in.do_THD, &dq_THD, &dk_SRD, &dv_SRD}) msa_check_float("attend_backward tensor", *t);

  float* partials = static_cast<float*>(workspace);
  float* scratch = partials + plan.pieces.partial_floats;
  const std::vector<MsaPiece>& pieces = plan.pieces.items;
  msa_for_each_item(static_cast<int64_t>(pieces.size()), plan.num_threads, [&](int64_t i, int worker) {
    ItemRun(plan, batch, in, dq_THD, partials, scratch + worker * plan.thread_floats).run(pieces[i]);
  });
  for (int r = 0; r < g.groups; ++r) {
    std::vector<MsaPartial> dk, dv;
    for (const MsaPiece& item : pieces) {
      if (item.group != r) continue;
      const float* rows = partials + item.partial_begin;
      dk.push_back({item.seq, item.num_keys, rows});
      dv.push_back({item.seq, item.num_keys, rows + item.num_keys * dp});
    }
    msa_sum_partials(batch, dk, dp, dk_SRD, g.groups, r);
    msa_sum_partials(batch, dv, dp, dv_SRD, g.groups, r);
  }
}

}  // namespace m3
