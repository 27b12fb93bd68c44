// CPU path, fp32: row by row, since every query has its own list. The keys of a list are gathered
// into panels, 128 at a time; packing them costs 1 / G of multiplying them.
#include "ops/dsa_kl/dsa_kl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/threads.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_partials.h"
#include "ops/common/msa_workers.h"
#include "ops/common/tile_gemm.h"

namespace m3 {
namespace {

constexpr int64_t kTileKeys = 128;
constexpr float kLog2e = 1.44269504088896340736f;

struct Scratch {
  float *u, *teacher, *logits;  // of the whole list: [A, budget], [budget] x 2
  float *columns, *rows;  // panels of a tile: keys as columns (D or X deep), index keys as rows
  float *q, *qx, *p, *du, *dqx;  // [G, D], [A, X], [G, keys], [A, keys], [A, Xp]

  static int64_t carve(const MsaGeometry& g, int index_heads, int64_t budget, float* base,
                       Scratch* out) {
    const int64_t xp = tile_round_up(g.index_dim), list = tile_round_up(budget);
    Scratch s;
    int64_t used = 0;
    const auto take = [&](float*& field, int64_t count) {
      field = base + used;
      used += tile_round_up(count);
    };
    take(s.u, index_heads * list);
    take(s.teacher, list);
    take(s.logits, list);
    take(s.columns, std::max(g.head_dim, g.index_dim) * kTileKeys);
    take(s.rows, kTileKeys * xp);
    take(s.q, g.heads_per_group * g.head_dim);
    take(s.qx, index_heads * xp);
    take(s.p, g.heads_per_group * kTileKeys);
    take(s.du, index_heads * kTileKeys);
    take(s.dqx, 2 * index_heads * xp);
    if (out != nullptr) *out = s;
    return used;
  }
};

class ItemRun {
 public:
  ItemRun(const DsaKlPlan& plan, const MsaBatch& batch, double weight, const DsaKlInputs& in,
          const DsaKlOutputs& out, float* partials, float* scratch)
      : g_(plan.geometry),
        batch_(batch),
        in_(in),
        out_(out),
        weight_(static_cast<float>(weight)),
        partials_(partials),
        keys_("k", batch, in.k_SRD, g_.block, g_.groups, g_.head_dim),
        index_keys_("kx", batch, in.kx_SX, g_.block, 0, g_.index_dim),
        tiles_(tile_kernels()),
        A_(plan.index_heads),
        budget_(plan.budget),
        list_stride_(tile_round_up(plan.budget)),
        xp_(tile_round_up(g_.index_dim)),
        factor_(static_cast<float>(
            1 / std::sqrt(static_cast<double>(plan.index_heads) * g_.index_dim))) {
    Scratch::carve(g_, plan.index_heads, plan.budget, scratch, &s_);
  }

  void run(const MsaPiece& item) {
    seq_ = item.seq;
    dkx_ = partials_ + item.partial_begin;
    std::memset(dkx_, 0, sizeof(float) * item.num_keys * xp_);
    for (int64_t i = item.q_begin; i < item.q_end; ++i) query_row(batch_.q_begin(seq_) + i);
  }

 private:
  static const char* row_of(const Tensor& t, int64_t row, int64_t dim) {
    return static_cast<const char*>(t.data()) + row * dim * dtype_bytes(t.dtype());
  }

  void query_row(int64_t t) {
    list_ = in_.tokens_TK.ptr<int32_t>() + t * budget_;
    count_ = std::find_if(list_, list_ + budget_, [](int32_t j) { return j < 0; }) - list_;
    std::fill_n(s_.dqx, A_ * xp_, 0.0f);
    float kl = 0;
    if (count_ > 0) {
      student_logits(t);
      teacher(t);
      kl = softmax_gradient();
      index_gradients(t);
    }
    if (out_.kl_T.defined()) out_.kl_T.ptr<float>()[t] = kl;
    for (int64_t i = 0; i < A_ * g_.index_dim; ++i) {
      const int64_t to = t * A_ * g_.index_dim + i;
      const float value = s_.dqx[i / g_.index_dim * xp_ + i % g_.index_dim];
      if (out_.dqx_TAX.dtype() == DType::kF32) {
        out_.dqx_TAX.ptr<float>()[to] = value;
      } else {
        out_.dqx_TAX.ptr<bf16>()[to] = bf16(value);
      }
    }
    if (!out_.dw_TA.defined()) return;
    for (int64_t a = 0; a < A_; ++a) {
      double sum = 0;
      for (int64_t j = 0; j < count_; ++j)
        sum += std::max(0.0f, s_.u[a * list_stride_ + j]) * s_.logits[j];
      out_.dw_TA.ptr<float>()[t * A_ + a] = static_cast<float>(sum) * factor_;
    }
  }

  // body(first, n): list entries [first, first + n), n <= kTileKeys.
  template <class Body>
  void for_tiles(Body body) const {
    for (int64_t first = 0; first < count_; first += kTileKeys)
      body(first, std::min(kTileKeys, count_ - first));
  }

  // Columns of the tile's keys, panels deep enough for `dim`.
  void pack_columns(const MsaKeys& keys, int head, int64_t dim, int64_t first, int64_t n) const {
    if (n % kTilePanel != 0) std::memset(s_.columns, 0, sizeof(float) * dim * tile_round_up(n));
    for (int64_t j = 0; j < n; ++j) {
      tile_pack_column(keys.row(seq_, list_[first + j], head), keys.dtype(), j, dim, s_.columns,
                       dim * kTilePanel);
    }
  }

  // u and I of the whole list.
  void student_logits(int64_t t) {
    const int64_t X = g_.index_dim;
    for (int64_t a = 0; a < A_; ++a) {
      tile_widen(row_of(in_.qx_TAX, t * A_ + a, X), in_.qx_TAX.dtype(), X, s_.qx + a * xp_);
    }
    for_tiles([&](int64_t first, int64_t n) {
      pack_columns(index_keys_, 0, X, first, n);
      tiles_.gemm(
          {A_, n, X, s_.qx, xp_, 1, s_.columns, X * kTilePanel, s_.u + first, list_stride_, false});
    });
    const float* w = in_.w_TA.ptr<float>() + t * A_;
    for (int64_t j = 0; j < count_; ++j) {
      float sum = 0;
      for (int64_t a = 0; a < A_; ++a) sum += w[a] * std::max(0.0f, s_.u[a * list_stride_ + j]);
      s_.logits[j] = sum * factor_;
    }
  }

  void teacher(int64_t t) {
    const int64_t D = g_.head_dim, G = g_.heads_per_group;
    const float scale = static_cast<float>(g_.logit_scale()) * kLog2e,
                share = 1.0f / static_cast<float>(g_.heads());
    std::fill_n(s_.teacher, count_, 0.0f);
    for (int r = 0; r < g_.groups; ++r) {
      const int64_t head = t * g_.heads() + r * G;
      for (int64_t h = 0; h < G; ++h)
        tile_widen(row_of(in_.q_THD, head + h, D), in_.q_THD.dtype(), D, s_.q + h * D);
      for_tiles([&](int64_t first, int64_t n) {
        pack_columns(keys_, r, D, first, n);
        tiles_.gemm({G, n, D, s_.q, D, 1, s_.columns, D * kTilePanel, s_.p, kTileKeys, false});
        for (int64_t h = 0; h < G; ++h) {
          float* p = s_.p + h * kTileKeys;
          const float lse = in_.lse_TH.ptr<float>()[head + h] * kLog2e;
          for (int64_t j = 0; j < n; ++j) p[j] = p[j] * scale - lse;
          tiles_.exp2(p, p, n);
          for (int64_t j = 0; j < n; ++j) s_.teacher[first + j] += share * p[j];
        }
      });
    }
  }

  // logits becomes dI; returns the KL.
  float softmax_gradient() {
    const float top = *std::max_element(s_.logits, s_.logits + count_);
    double sum = 0, kl = 0;
    for (int64_t j = 0; j < count_; ++j) sum += std::exp(static_cast<double>(s_.logits[j] - top));
    const double lse = top + std::log(sum);
    for (int64_t j = 0; j < count_; ++j) {
      const double log_student = s_.logits[j] - lse, pt = s_.teacher[j];
      if (pt > 0) kl += pt * (std::log(pt) - log_student);
      s_.logits[j] = weight_ * static_cast<float>(std::exp(log_student) - pt);
    }
    return static_cast<float>(kl);
  }

  void index_gradients(int64_t t) {
    const int64_t X = g_.index_dim;
    const float* w = in_.w_TA.ptr<float>() + t * A_;
    for_tiles([&](int64_t first, int64_t n) {
      for (int64_t a = 0; a < A_; ++a) {
        const float* u = s_.u + a * list_stride_ + first;
        for (int64_t j = 0; j < n; ++j) {
          s_.du[a * kTileKeys + j] = u[j] > 0 ? s_.logits[first + j] * w[a] * factor_ : 0.0f;
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        const int32_t position = list_[first + j];
        tile_pack_row(index_keys_.row(seq_, position, 0), index_keys_.dtype(), j, X, s_.rows,
                      n * kTilePanel);
        float* dkx = dkx_ + position * xp_;
        for (int64_t a = 0; a < A_; ++a) {
          const float du = s_.du[a * kTileKeys + j];
          if (du == 0) continue;
          const float* qx = s_.qx + a * xp_;
          for (int64_t c = 0; c < X; ++c) dkx[c] += du * qx[c];
        }
      }
      float* part = s_.dqx + A_ * xp_;
      tiles_.gemm({A_, X, n, s_.du, kTileKeys, 1, s_.rows, n * kTilePanel, part, xp_, false});
      for (int64_t i = 0; i < A_ * xp_; ++i) s_.dqx[i] += part[i];
    });
  }

  const MsaGeometry& g_;
  const MsaBatch& batch_;
  const DsaKlInputs& in_;
  const DsaKlOutputs& out_;
  const float weight_;
  float* partials_;
  const MsaKeys keys_, index_keys_;
  const TileKernels& tiles_;
  const int64_t A_, budget_, list_stride_, xp_;
  const float factor_;
  Scratch s_;
  int seq_ = 0;
  const int32_t* list_ = nullptr;
  int64_t count_ = 0;
  float* dkx_ = nullptr;
};

void clear_rows(const MsaBatch& batch, std::span<const int32_t> sequences,
                const DsaKlOutputs& out) {
  for (const int32_t n : sequences) {
    for (const Tensor* t : {&out.dqx_TAX, &out.dw_TA, &out.kl_T}) {
      if (!t->defined()) continue;
      const Tensor rows = t->rows(batch.q_begin(n), batch.q_begin(n) + batch.q_len(n));
      std::memset(rows.data(), 0, rows.bytes());
    }
  }
}

}  // namespace

DsaKlPlan dsa_kl_plan(const MsaGeometry& geometry, int index_heads, int64_t budget,
                      const MsaBatch& batch, std::span<const uint8_t> takes_part) {
  geometry.check();
  batch.check(geometry.block);
  M3_CHECK(geometry.index_dim > 0 && index_heads > 0 && budget > 0,
           "dsa_kl: index_dim {}, {} index heads, lists of {} tokens; all must be positive",
           geometry.index_dim, index_heads, budget);
  M3_CHECK(batch.layout == KvLayout::kPacked,
           "dsa_kl takes packed keys; a paged cache is for inference");
  M3_CHECK(takes_part.empty() || static_cast<int>(takes_part.size()) == batch.num_seqs,
           "dsa_kl: {} marks for {} sequences", takes_part.size(), batch.num_seqs);
  DsaKlPlan plan;
  plan.geometry = geometry;
  plan.index_heads = index_heads;
  plan.budget = budget;
  plan.num_queries = batch.num_queries;
  plan.num_keys = batch.num_seqs > 0 ? batch.cu_k[batch.num_seqs] : 0;
  plan.num_threads = num_threads();
  plan.pieces = msa_cut(batch, 1, tile_round_up(geometry.index_dim), takes_part);
  plan.thread_floats = Scratch::carve(geometry, index_heads, budget, nullptr, nullptr);
  plan.workspace_bytes = static_cast<int64_t>(sizeof(float)) *
                         (plan.pieces.partial_floats + plan.num_threads * plan.thread_floats);
  return plan;
}

void dsa_kl(const DsaKlPlan& plan, const MsaBatch& batch, double weight, const DsaKlInputs& in,
            const DsaKlOutputs& out, void* workspace) {
  const MsaGeometry& g = plan.geometry;
  const int64_t T = plan.num_queries, S = plan.num_keys, A = plan.index_heads, X = g.index_dim;
  M3_CHECK(batch.num_queries == T && (batch.num_seqs > 0 ? batch.cu_k[batch.num_seqs] : 0) == S,
           "dsa_kl: the plan was made for {} queries and {} keys, the batch has {}", T, S,
           batch.num_queries);
  msa_check_tensor("q_THD", in.q_THD, {T, g.heads(), g.head_dim}, {});
  msa_check_tensor("k_SRD", in.k_SRD, {S, g.groups, g.head_dim}, {});
  msa_check_tensor("lse_TH", in.lse_TH, {T, g.heads()}, {});
  msa_check_tensor("qx_TAX", in.qx_TAX, {T, A, X}, {});
  msa_check_tensor("kx_SX", in.kx_SX, {S, X}, {});
  msa_check_tensor("w_TA", in.w_TA, {T, A}, {});
  msa_check_tensor("tokens_TK", in.tokens_TK, {T, plan.budget}, {});
  msa_check_tensor("dqx_TAX", out.dqx_TAX, {T, A, X}, {});
  msa_check_tensor("dkx_SX", out.dkx_SX, {S, X}, {});
  if (out.dw_TA.defined()) msa_check_tensor("dw_TA", out.dw_TA, {T, A}, {});
  if (out.kl_T.defined()) msa_check_tensor("kl_T", out.kl_T, {T}, {});
  for (const Tensor* t : {&in.q_THD, &in.qx_TAX, &out.dqx_TAX, &out.dkx_SX})
    msa_check_float("dsa_kl tensor", *t);

  clear_rows(batch, plan.pieces.left_out, out);
  const int64_t xp = tile_round_up(X);
  float* partials = static_cast<float*>(workspace);
  float* scratch = partials + plan.pieces.partial_floats;
  const std::vector<MsaPiece>& pieces = plan.pieces.items;
  msa_for_each_item(static_cast<int64_t>(pieces.size()), plan.num_threads, [&](int64_t i, int worker) {
    ItemRun(plan, batch, weight, in, out, partials, scratch + worker * plan.thread_floats)
        .run(pieces[i]);
  });
  std::vector<MsaPartial> dkx;
  for (const MsaPiece& piece : pieces) {
    dkx.push_back({piece.seq, piece.num_keys, partials + piece.partial_begin});
  }
  msa_sum_partials(batch, dkx, xp, out.dkx_SX, 1, 0);
}

}  // namespace m3
