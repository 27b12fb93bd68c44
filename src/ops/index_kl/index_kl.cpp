// Fast CPU path, fp32, from key tile to key tile as attend_backward. Two passes over the tiles of a chunk of query rows:
// the first finds LSE_x of the student, the second recomputes both distributions and sums the gradients. Per visible
// (query, group, key) triple: 2 G D (teacher) + 8 X FLOP.
#include "ops/index_kl/index_kl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/threads.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_partials.h"
#include "ops/common/msa_walk.h"
#include "ops/common/msa_workers.h"
#include "ops/common/tile_gemm.h"

namespace m3 {
namespace {

constexpr int kBatchRows = 128;         // (query, head) rows multiplied at once, at least one query
constexpr int64_t kChunkQueries = 256;  // query rows per pass over the tiles
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

int64_t batch_queries(const MsaGeometry& g) { return std::max(1, kBatchRows / g.heads_per_group); }

struct Scratch {
  float *dqi, *top, *sum, *kl;             // of a chunk and group: [queries, Xp], [queries] x 3; top becomes LSE_x log2 e
  float *k_columns, *ki_columns, *ki_rows; // panels of K^T [D][keys], of ki^T [X][keys], of ki [keys][X]
  float *q, *qi, *qi_panels;               // a batch: [M, D], [mq, X], panels [mq][X]
  float *p, *teacher, *z, *dqi_batch;      // [M, keys], [mq, keys] x 2, [mq, Xp]

  static int64_t carve(const MsaGeometry& g, float* base, Scratch* out) {
    const int64_t xp = tile_round_up(g.index_dim), mq = batch_queries(g), m = mq * g.heads_per_group;
    const int64_t keys = MsaWalk::kTileKeys;
    Scratch s;
    int64_t used = 0;
    const auto take = [&](float*& field, int64_t count) {
      field = base + used;
      used += tile_round_up(count);
    };
    take(s.dqi, kChunkQueries * xp);
    for (float** row : {&s.top, &s.sum, &s.kl}) take(*row, kChunkQueries);
    take(s.k_columns, g.head_dim * keys);
    take(s.ki_columns, g.index_dim * keys);
    take(s.ki_rows, keys * xp);
    take(s.q, m * g.head_dim);
    take(s.qi, mq * xp);
    take(s.qi_panels, mq * xp);
    take(s.p, m * keys);
    take(s.teacher, mq * keys);
    take(s.z, mq * keys);
    take(s.dqi_batch, mq * xp);
    if (out != nullptr) *out = s;
    return used;
  }
};

class ItemRun {
 public:
  ItemRun(const IndexKlPlan& plan, const MsaBatch& batch, double weight, const IndexKlInputs& in,
          const IndexKlOutputs& out, float* partials, float* scratch)
      : g_(plan.geometry),
        batch_(batch),
        in_(in),
        out_(out),
        factor_(static_cast<float>(weight * g_.index_scale())),
        partials_(partials),
        keys_("k", batch, in.k_SRD, g_.block, g_.groups, g_.head_dim),
        index_keys_("ki", batch, in.ki_SX, g_.block, 0, g_.index_dim),
        walk_(plan.geometry, batch, plan.support, in.lists),
        tiles_(tile_kernels()),
        D_(g_.head_dim),
        X_(g_.index_dim),
        G_(g_.heads_per_group),
        R_(g_.groups),
        xp_(tile_round_up(g_.index_dim)) {
    Scratch::carve(g_, scratch, &s_);
  }

  void run(const MsaPiece& item) {
    item_ = &item;
    dki_ = partials_ + item.partial_begin;
    std::memset(dki_, 0, sizeof(float) * item.num_keys * xp_);
    for (int64_t begin = item.q_begin; begin < item.q_end; begin += kChunkQueries) {
      const int64_t end = std::min<int64_t>(begin + kChunkQueries, item.q_end);
      for (int r = 0; r < R_; ++r) chunk(r, begin, end);
    }
  }

 private:
  int64_t token(int64_t query) const { return batch_.q_begin(item_->seq) + query; }
  const char* row_of(const Tensor& t, int64_t row, int64_t dim) const {
    return static_cast<const char*>(t.data()) + row * dim * dtype_bytes(t.dtype());
  }

  void chunk(int r, int64_t begin, int64_t end) {
    group_ = r;
    chunk_begin_ = begin;
    const int64_t count = end - begin;
    std::fill_n(s_.top, count, kNegInf);
    std::fill_n(s_.sum, count, 0.0f);
    std::fill_n(s_.kl, count, 0.0f);
    std::memset(s_.dqi, 0, sizeof(float) * count * xp_);
    for_batches(begin, end, [&](const MsaWalk::Tile& tile, int64_t first, int64_t last) {
      student_logits(tile, first, last);
      add_to_sums(tile, first, last);
    });
    // LSE_x in units of log2: what exp2 subtracts below.
    for (int64_t i = 0; i < count; ++i) s_.top[i] = s_.sum[i] > 0 ? s_.top[i] + std::log2(s_.sum[i]) : kNegInf;
    for_batches(begin, end, [&](const MsaWalk::Tile& tile, int64_t first, int64_t last) {
      student_logits(tile, first, last);
      teacher(tile, first, last);
      gradients(tile, first, last);
    });
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = token(begin + i), flat = int64_t{r} * batch_.num_queries + t;
      if (out_.lse_x_RT.defined()) out_.lse_x_RT.ptr<float>()[flat] = s_.top[i] / kLog2e;
      if (out_.kl_RT.defined()) out_.kl_RT.ptr<float>()[flat] = s_.kl[i];
      const float* from = s_.dqi + i * xp_;
      for (int64_t c = 0; c < X_; ++c) {
        const int64_t to = (t * R_ + r) * X_ + c;
        if (out_.dqi_TRX.dtype() == DType::kF32) {
          out_.dqi_TRX.ptr<float>()[to] = from[c];
        } else {
          out_.dqi_TRX.ptr<bf16>()[to] = bf16(from[c]);
        }
      }
    }
  }

  // body(tile, first, last) for batches of the rows of every tile, with the tile's keys packed.
  template <class Body>
  void for_batches(int64_t begin, int64_t end, Body body) {
    walk_.start(item_->seq, group_, begin, end);
    MsaWalk::Tile tile;
    const int64_t step = batch_queries(g_);
    while (walk_.next(tile)) {
      pack_keys(tile);
      const int64_t count = static_cast<int64_t>(tile.queries.size());
      for (int64_t first = 0; first < count; first += step) body(tile, first, std::min(first + step, count));
    }
  }

  void pack_keys(const MsaWalk::Tile& tile) {
    const int64_t padded = tile_round_up(tile.num_keys);
    if (padded != tile.num_keys) {
      std::memset(s_.k_columns, 0, sizeof(float) * D_ * padded);
      std::memset(s_.ki_columns, 0, sizeof(float) * X_ * padded);
    }
    for (int j = 0; j < tile.num_keys; ++j) {
      const void* key = keys_.row(item_->seq, tile.key_begin + j, group_);
      const void* index_key = index_keys_.row(item_->seq, tile.key_begin + j, 0);
      tile_pack_column(key, keys_.dtype(), j, D_, s_.k_columns, D_ * kTilePanel);
      tile_pack_column(index_key, index_keys_.dtype(), j, X_, s_.ki_columns, X_ * kTilePanel);
      tile_pack_row(index_key, index_keys_.dtype(), j, X_, s_.ki_rows, int64_t{tile.num_keys} * kTilePanel);
    }
  }

  // z[i, j] = scale_x log2(e) qi . ki, -inf where hidden.
  void student_logits(const MsaWalk::Tile& tile, int64_t first, int64_t last) {
    const int64_t mq = last - first, n = tile.num_keys, np = tile_round_up(n);
    for (int64_t i = 0; i < mq; ++i) {
      const int64_t row = token(tile.queries[first + i]) * R_ + group_;
      tile_widen(row_of(in_.qi_TRX, row, X_), in_.qi_TRX.dtype(), X_, s_.qi + i * X_);
      tile_pack_row(s_.qi + i * X_, DType::kF32, i, X_, s_.qi_panels, mq * kTilePanel);
    }
    tiles_.gemm({mq, n, X_, s_.qi, X_, 1, s_.ki_columns, X_ * kTilePanel, s_.z, np, false});
    const float scale = static_cast<float>(g_.index_scale()) * kLog2e;
    for (int64_t i = 0; i < mq; ++i) {
      float* z = s_.z + i * np;
      for (int64_t j = 0; j < n; ++j) z[j] *= scale;
      walk_.for_hidden(tile, static_cast<int>(first + i), [&](int j) { z[j] = kNegInf; });
    }
  }

  void add_to_sums(const MsaWalk::Tile& tile, int64_t first, int64_t last) {
    const int64_t n = tile.num_keys, np = tile_round_up(n);
    for (int64_t i = 0; i < last - first; ++i) {
      const int64_t at = tile.queries[first + i] - chunk_begin_;
      float* z = s_.z + i * np;
      const float top = std::max(s_.top[at], *std::max_element(z, z + n));
      if (top == kNegInf) continue;
      float rescale = s_.top[at] - top;
      tiles_.exp2(&rescale, &rescale, 1);
      for (int64_t j = 0; j < n; ++j) z[j] -= top;
      tiles_.exp2(z, z, n);
      float sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += z[j];
      s_.sum[at] = s_.sum[at] * rescale + sum;
      s_.top[at] = top;
    }
  }

  // teacher[i, j] = mean over the group's heads of P, 0 where hidden.
  void teacher(const MsaWalk::Tile& tile, int64_t first, int64_t last) {
    const int64_t mq = last - first, m = mq * G_, n = tile.num_keys, np = tile_round_up(n);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t row = token(tile.queries[first + i / G_]) * R_ * G_ + group_ * G_ + i % G_;
      tile_widen(row_of(in_.q_THD, row, D_), in_.q_THD.dtype(), D_, s_.q + i * D_);
    }
    tiles_.gemm({m, n, D_, s_.q, D_, 1, s_.k_columns, D_ * kTilePanel, s_.p, np, false});
    const float scale = static_cast<float>(g_.logit_scale()) * kLog2e, share = 1.0f / static_cast<float>(G_);
    for (int64_t i = 0; i < mq; ++i) {
      float* mean = s_.teacher + i * np;
      std::fill_n(mean, n, 0.0f);
      for (int64_t h = 0; h < G_; ++h) {
        float* p = s_.p + (i * G_ + h) * np;
        const int64_t head = token(tile.queries[first + i]) * R_ * G_ + group_ * G_ + h;
        const float lse = in_.lse_TH.ptr<float>()[head] * kLog2e;
        for (int64_t j = 0; j < n; ++j) p[j] = p[j] * scale - lse;
        tiles_.exp2(p, p, n);
        for (int64_t j = 0; j < n; ++j) mean[j] += share * p[j];
      }
      walk_.for_hidden(tile, static_cast<int>(first + i), [&](int j) { mean[j] = 0; });
    }
  }

  // z becomes d = factor (pi - teacher); dki += d^T qi, dqi += d ki.
  void gradients(const MsaWalk::Tile& tile, int64_t first, int64_t last) {
    const int64_t mq = last - first, n = tile.num_keys, np = tile_round_up(n);
    for (int64_t i = 0; i < mq; ++i) {
      const int64_t at = tile.queries[first + i] - chunk_begin_;
      float* z = s_.z + i * np;
      const float* pt = s_.teacher + i * np;
      for (int64_t j = 0; j < n; ++j) z[j] -= s_.top[at];  // log2 of the student
      if (out_.kl_RT.defined()) {
        float kl = 0;
        for (int64_t j = 0; j < n; ++j) {
          if (pt[j] > 0) kl += pt[j] * (std::log(pt[j]) - z[j] / kLog2e);
        }
        s_.kl[at] += kl;
      }
      tiles_.exp2(z, z, n);
      for (int64_t j = 0; j < n; ++j) z[j] = factor_ * (z[j] - pt[j]);
    }
    tiles_.gemm({n, X_, mq, s_.z, 1, np, s_.qi_panels, mq * kTilePanel, dki_ + tile.key_begin * xp_, xp_, true});
    tiles_.gemm({mq, X_, n, s_.z, np, 1, s_.ki_rows, n * kTilePanel, s_.dqi_batch, xp_, false});
    for (int64_t i = 0; i < mq; ++i) {
      float* to = s_.dqi + (tile.queries[first + i] - chunk_begin_) * xp_;
      for (int64_t c = 0; c < X_; ++c) to[c] += s_.dqi_batch[i * xp_ + c];
    }
  }

  const MsaGeometry& g_;
  const MsaBatch& batch_;
  const IndexKlInputs& in_;
  const IndexKlOutputs& out_;
  const float factor_;
  float* partials_;
  const MsaKeys keys_, index_keys_;
  MsaWalk walk_;
  const TileKernels& tiles_;
  const int64_t D_, X_, G_, R_, xp_;
  Scratch s_;
  const MsaPiece* item_ = nullptr;
  int group_ = 0;
  int64_t chunk_begin_ = 0;
  float* dki_ = nullptr;
};

}  // namespace

IndexKlPlan index_kl_plan(const MsaGeometry& geometry, const MsaBatch& batch, const AttendSupport& support,
                          std::span<const uint8_t> takes_part) {
  geometry.check();
  batch.check(geometry.block);
  M3_CHECK(geometry.index_dim > 0, "index_kl needs an index branch; index_dim is 0");
  M3_CHECK(batch.layout == KvLayout::kPacked, "index_kl takes packed keys; a paged cache is for inference");
  M3_CHECK(support.kind == AttendSupport::Kind::kBlocks || support.kind == AttendSupport::Kind::kFull,
           "index_kl is defined on the selected blocks or on the whole history, not on a window or a token list");
  M3_CHECK(takes_part.empty() || static_cast<int>(takes_part.size()) == batch.num_seqs,
           "index_kl: {} marks for {} sequences", takes_part.size(), batch.num_seqs);
  IndexKlPlan plan;
  plan.geometry = geometry;
  plan.support = support;
  plan.num_queries = batch.num_queries;
  plan.num_keys = batch.num_seqs > 0 ? batch.cu_k[batch.num_seqs] : 0;
  plan.num_threads = num_threads();
  plan.pieces = msa_cut(batch, 1, tile_round_up(geometry.index_dim), takes_part);
  plan.thread_floats = Scratch::carve(geometry, nullptr, nullptr);
  plan.workspace_bytes = static_cast<int64_t>(sizeof(float)) * (plan.pieces.partial_floats + plan.num_threads * plan.thread_floats);
  return plan;
}

namespace {

// Rows of the sequences that take no part. Their keys have no partial sums and so become 0.
void clear_rows(const MsaBatch& batch, std::span<const int32_t> sequences, const IndexKlOutputs& out) {
  for (const int32_t n : sequences) {
    const int64_t begin = batch.q_begin(n), count = batch.q_len(n);
    const Tensor dqi = out.dqi_TRX.rows(begin, begin + count);
    std::memset(dqi.data(), 0, dqi.bytes());
    for (auto [rows, value] : {std::pair{&out.kl_RT, 0.0f}, std::pair{&out.lse_x_RT, kNegInf}}) {
      if (!rows->defined()) continue;
      for (int64_t r = 0; r < rows->dim(0); ++r) std::fill_n((*rows)[r].ptr<float>() + begin, count, value);
    }
  }
}

}  // namespace

void index_kl(const IndexKlPlan& plan, const MsaBatch& batch, double weight, const IndexKlInputs& in,
              const IndexKlOutputs& out, void* workspace) {
  const MsaGeometry& g = plan.geometry;
  const int64_t T = plan.num_queries, S = plan.num_keys, R = g.groups, X = g.index_dim;
  M3_CHECK(batch.num_queries == T && (batch.num_seqs > 0 ? batch.cu_k[batch.num_seqs] : 0) == S,
           "index_kl: the plan was made for {} queries and {} keys, the batch has {}", T, S, batch.num_queries);
  msa_check_tensor("q_THD", in.q_THD, {T, g.heads(), g.head_dim}, {});
  msa_check_tensor("k_SRD", in.k_SRD, {S, R, g.head_dim}, {});
  msa_check_tensor("lse_TH", in.lse_TH, {T, g.heads()}, {});
  msa_check_tensor("qi_TRX", in.qi_TRX, {T, R, X}, {});
  msa_check_tensor("ki_SX", in.ki_SX, {S, X}, {});
  msa_check_tensor("dqi_TRX", out.dqi_TRX, {T, R, X}, {});
  msa_check_tensor("dki_SX", out.dki_SX, {S, X}, {});
  if (out.kl_RT.defined()) msa_check_tensor("kl_RT", out.kl_RT, {R, T}, {});
  if (out.lse_x_RT.defined()) msa_check_tensor("lse_x_RT", out.lse_x_RT, {R, T}, {});
  for (const Tensor* t : {&in.q_THD, &in.qi_TRX, &out.dqi_TRX, &out.dki_SX}) msa_check_float("index_kl tensor", *t);

  clear_rows(batch, plan.pieces.left_out, out);
  const int64_t xp = tile_round_up(X);
  float* partials = static_cast<float*>(workspace);
  float* scratch = partials + plan.pieces.partial_floats;
  const std::vector<MsaPiece>& pieces = plan.pieces.items;
  msa_for_each_item(static_cast<int64_t>(pieces.size()), plan.num_threads, [&](int64_t i, int worker) {
    ItemRun(plan, batch, weight, in, out, partials, scratch + worker * plan.thread_floats).run(pieces[i]);
  });
  std::vector<MsaPartial> dki;
  for (const MsaPiece& piece : pieces) dki.push_back({piece.seq, piece.num_keys, partials + piece.partial_begin});
  msa_sum_partials(batch, dki, xp, out.dki_SX, 1, 0);
}

}  // namespace m3
