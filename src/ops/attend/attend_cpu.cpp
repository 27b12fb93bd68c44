// attend on the CPU. An item is a chunk of query rows of one group. Keys are the outer loop: a tile (a
// block, or up to 128 positions) is packed once and applied to every row of the chunk that sees it
// (msa_kernels.h: attend_rows), each row keeping its running softmax state (m, l, O) in memory. Tiles
// ascend for every row, and a row's numbers do not depend on what it shares a tile with.
//
// A row's keys fall into spans at fixed places: of its blocks in ascending order, or of the sequence's tiles. Each
// span is summed from nothing and joined to those before it. Up to kDecodeQueries query rows, spans are items of
// their own, so that threads share the keys of few rows; otherwise an item joins them as it goes. The order of sums
// is the same, so neither the number of query rows nor chunks nor threads show in the bits.
//
// A block-row pair costs 4 D B FLOPs per head and moves 8 D bytes of state in and out; a chunk's state is
// sized to stay in the outer caches.
#include "ops/attend/attend_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/common/msa_kernels.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_workers.h"

namespace m3 {
namespace {

using Kind = AttendSupport::Kind;

constexpr int kItemsPerThread = 4;
constexpr int kMinChunk = 16;           // query rows
constexpr int kDenseChunk = 64;         // every tile is shared by all rows anyway
constexpr int kMaxSparseChunk = 1024;
constexpr int kMaxChunkRows = 16384;    // 16 MB of queries and states per thread at D = 128
constexpr int kBlocksPerSpan = 8;
constexpr int kTilesPerSpan = 8;
constexpr int kMaxTopk = 128;  // MsaGeometry::check

// Where the span of tiles that begins at `tile` ends. Late spans are longer, a 16th of what lies before them, so that
// a million keys make 85 spans of which none delays the others.
int64_t span_end(int64_t tile) { return tile + std::max<int64_t>(kTilesPerSpan, tile / 16); }

int64_t num_tiles(int64_t num_keys) { return (num_keys + kMsaTileKeys - 1) / kMsaTileKeys; }

// 1 where the kind knows no spans.
int num_spans(const MsaGeometry& g, const AttendSupport& support, int64_t num_keys) {
  int count = 0;
  if (support.kind == Kind::kBlocks) {
    const int64_t blocks = std::min<int64_t>(g.topk, (num_keys + g.block - 1) / g.block);
    count = static_cast<int>((blocks + kBlocksPerSpan - 1) / kBlocksPerSpan);
  } else if (support.kind == Kind::kFull) {
    for (int64_t tile = 0; tile < num_tiles(num_keys); tile = span_end(tile)) ++count;
  }
  return std::max(count, 1);
}

// State rows of a chunk or of a split: O unnormalised, m in units of log2.
struct State {
  float *o, *m, *l;
};

State take_state(MsaCarver& carver, int64_t rows, int64_t dim) {
  State s;
  s.o = carver.take<float>(rows * dim);
  s.m = carver.take<float>(rows);
  s.l = carver.take<float>(rows);
  return s;
}

// Joins the sums of a span (o, m, l) to those of the spans before it. Not inlined: one instruction sequence for all.
[[gnu::noinline]] void join_span(float* total_o, float& total_m, float& total_l, const float* o, float m, float l,
                                 int dim) {
  if (l == 0) return;  // the row saw nothing there
  const float top = std::max(total_m, m);
  const float keep = total_l == 0 ? 0.0f : std::exp2(total_m - top), weight = std::exp2(m - top);
  total_m = top;
  total_l = total_l * keep + l * weight;
  for (int c = 0; c < dim; ++c) total_o[c] = total_o[c] * keep + o[c] * weight;
}

// What one thread needs.
struct Scratch {
  uint32_t* q;         // [rows, D] words
  State state;
  State total;         // of the spans done; only where there are several
  int32_t* ranks;      // [chunk] blocks that a query row has met
  uint32_t *keys, *values;
  float* scores;
  uint32_t* weights;
  uint64_t* visits;    // block << 32 | query, of the chunk's lists
};

int64_t padded_dim(const MsaGeometry& g) { return (g.head_dim + kMsaMaxPanel - 1) / kMsaMaxPanel * kMsaMaxPanel; }

Scratch take_scratch(MsaCarver& carver, const AttendPlan& plan) {
  const MsaGeometry& g = plan.geometry;
  const int64_t rows = int64_t{plan.chunk} * g.heads_per_group;
  Scratch s{};
  s.q = carver.take<uint32_t>(rows * g.head_dim);
  s.state = take_state(carver, rows, padded_dim(g));
  if (plan.has_spans) s.total = take_state(carver, rows, padded_dim(g));
  s.ranks = carver.take<int32_t>(plan.chunk);
  s.keys = carver.take<uint32_t>(int64_t{kMsaTileKeys} * g.head_dim);
  s.values = carver.take<uint32_t>(kMsaTileKeys * padded_dim(g));
  s.scores = carver.take<float>(kMsaBatchRows * kMsaTileKeys);
  s.weights = carver.take<uint32_t>(kMsaBatchRows * kMsaTileKeys);
  s.visits = carver.take<uint64_t>(int64_t{plan.chunk} * g.topk);
  return s;
}

bool all_finite(const void* const* rows, int count, int dim, DType dtype) {
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    for (int c = 0; c < dim; ++c) {
      finite &= dtype == DType::kBF16 ? (static_cast<const uint16_t*>(rows[i])[c] & 0x7f80u) != 0x7f80u
                                      : (static_cast<const uint32_t*>(rows[i])[c] & 0x7f800000u) != 0x7f800000u;
    }
  }
  return finite;
}

struct Inputs {
  const AttendPlan& plan;
  const MsaBatch& batch;
  const AttendCpuArgs& args;
  const MsaKeys k, v;
  const MsaKernels& kernels;
};

// One item: its rows, their state, and the tile at hand.
class Chunk {
 public:
  Chunk(const Inputs& in, const AttendItem& item, const Scratch& scratch)
      : in_(in), g_(in.plan.geometry), support_(in.plan.options.support), item_(item), s_(scratch),
        first_position_(in.batch.first_position(item.seq)), first_row_(in.batch.q_begin(item.seq)) {}

  int64_t num_rows() const { return int64_t{item_.q_end - item_.q_begin} * g_.heads_per_group; }

  void run() {
    clear(s_.state, 0, num_rows());
    if (joins()) clear(s_.total, 0, num_rows());
    if (position(item_.q_end - 1) < 0) return;
    pack_queries();
    switch (support_.kind) {
      case Kind::kBlocks: run_blocks(); break;
      case Kind::kTokens: run_tokens(); break;
      case Kind::kFull:
      case Kind::kWindow: run_range(); break;
    }
  }

  void write() const;
  void save_partial(const State& partial) const;

 private:
  int64_t position(int q) const { return first_position_ + q; }

  // An item of several spans joins them itself.
  bool joins() const { return in_.plan.has_spans && item_.num_splits == 1; }

  void clear(const State& state, int64_t begin, int64_t count) const {
    const int stride = in_.kernels.padded(g_.head_dim);
    std::fill_n(state.o + begin * stride, count * stride, 0.0f);
    std::fill_n(state.m + begin, count, -std::numeric_limits<float>::infinity());
    std::fill_n(state.l + begin, count, 0.0f);
  }

  // A span ends for query rows [q_begin, q_end) of the sequence.
  void end_span(int q_begin, int q_end) const {
    const int G = g_.heads_per_group, stride = in_.kernels.padded(g_.head_dim);
    const int64_t begin = int64_t{q_begin - item_.q_begin} * G, count = int64_t{q_end - q_begin} * G;
    for (int64_t id = begin; id < begin + count; ++id) {
      join_span(s_.total.o + id * stride, s_.total.m[id], s_.total.l[id], s_.state.o + id * stride, s_.state.m[id],
                s_.state.l[id], g_.head_dim);
    }
    clear(s_.state, begin, count);
  }

  void pack_queries() const {
    const int G = g_.heads_per_group, D = g_.head_dim, steps = in_.kernels.steps(D);
    const DType dtype = in_.args.q_THD->dtype();
    for (int q = item_.q_begin; q < item_.q_end; ++q) {
      const int64_t element = ((first_row_ + q) * g_.heads() + item_.group * G) * D;
      const char* from = static_cast<const char*>(in_.args.q_THD->data()) + element * dtype_bytes(dtype);
      for (int h = 0; h < G; ++h) {
        in_.kernels.pack_row(from + int64_t{h} * D * dtype_bytes(dtype), D, dtype,
                             s_.q + (int64_t{q - item_.q_begin} * G + h) * steps);
      }
    }
  }

  // -------------------------------------------------------------------------------- which tiles, which rows

  // The blocks of a row, or those of one span of it: lists may come in any order, spans go by rank.
  int64_t add_visits(int q, uint64_t* visits) const {
    const int64_t own = position(q) < 0 ? -1 : position(q) / g_.block;
    const int32_t* ids = in_.args.lists + (item_.group * in_.plan.num_queries + first_row_ + q) * g_.topk;
    int count = 0;
    for (; count < g_.topk && ids[count] >= 0; ++count) {
      M3_CHECK(ids[count] <= own, "ids_RTK[{}, {}, {}] is block {}, but the row's own block is {}", item_.group,
               first_row_ + q, count, ids[count], own);
    }
    int32_t sorted[kMaxTopk];
    int begin = 0, end = count;
    if (item_.num_splits > 1) {
      std::copy_n(ids, count, sorted);
      std::sort(sorted, sorted + count);
      ids = sorted;
      begin = std::min(item_.split * kBlocksPerSpan, count);
      end = std::min(begin + kBlocksPerSpan, count);
    }
    for (int i = begin; i < end; ++i) {
      *visits++ = uint64_t{static_cast<uint32_t>(ids[i])} << 32 | static_cast<uint32_t>(q);
    }
    return end - begin;
  }

  void run_blocks() {
    int64_t num_visits = 0;
    for (int q = item_.q_begin; q < item_.q_end; ++q) num_visits += add_visits(q, s_.visits + num_visits);
    std::sort(s_.visits, s_.visits + num_visits);
    std::fill_n(s_.ranks, item_.q_end - item_.q_begin, 0);
    for (int64_t i = 0; i < num_visits;) {
      const int64_t block_id = static_cast<int64_t>(s_.visits[i] >> 32);
      int64_t end = i;
      while (end < num_visits && static_cast<int64_t>(s_.visits[end] >> 32) == block_id) ++end;
      const int64_t last = std::min<int64_t>((block_id + 1) * g_.block, position(item_.q_end - 1) + 1);
      for (int64_t e = i; joins() && e < end; ++e) {
        const int q = static_cast<int>(s_.visits[e] & 0xffffffffu);
        const int rank = s_.ranks[q - item_.q_begin]++;
        if (rank > 0 && rank % kBlocksPerSpan == 0) end_span(q, q + 1);
      }
      look_ahead(end < num_visits ? static_cast<int64_t>(s_.visits[end] >> 32) * g_.block : -1);
      for (int64_t j = block_id * g_.block; j < last; j += kMsaTileKeys) {
        load_tile(j, static_cast<int>(std::min<int64_t>(kMsaTileKeys, last - j)));
        for (int64_t e = i; e < end; ++e) add_query(static_cast<int>(s_.visits[e] & 0xffffffffu));
        flush();
      }
      i = end;
    }
  }

  // All keys, or a window with its sink, in tiles of consecutive positions.
  void run_range() {
    const int64_t end = position(item_.q_end - 1) + 1;
    if (support_.kind == Kind::kWindow) {
      const int64_t oldest = std::max<int64_t>(position(item_.q_begin), 0) - support_.window + 1;  // of the windows
      const int64_t window_tile = std::max<int64_t>(oldest, 0) / kMsaTileKeys;
      run_tiles(0, std::min(num_tiles(support_.sink), window_tile), end);
      run_tiles(window_tile, num_tiles(end), end);
      return;
    }
    int64_t begin = 0;
    for (int split = 0; begin < num_tiles(end); ++split) {
      const int64_t next = std::min(span_end(begin), num_tiles(end));
      if (item_.num_splits == 1 || split == item_.split) run_tiles(begin, next, end);
      if (joins() && next < num_tiles(end)) end_span(item_.q_begin, item_.q_end);
      begin = next;
    }
  }

  void run_tiles(int64_t begin, int64_t end, int64_t num_keys) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t j = tile * kMsaTileKeys;
      load_tile(j, static_cast<int>(std::min<int64_t>(kMsaTileKeys, num_keys - j)));
      look_ahead(j + kMsaTileKeys < num_keys ? j + kMsaTileKeys : -1);
      for (int q = item_.q_begin; q < item_.q_end; ++q) add_query(q);
      flush();
    }
  }

  // Each query has its own list, so nothing is shared but the group's heads.
  void run_tokens() {
    for (int q = item_.q_begin; q < item_.q_end; ++q) {
      const int32_t* tokens = in_.args.lists + (first_row_ + q) * support_.budget;
      for (int64_t slot = 0; slot < support_.budget && tokens[slot] >= 0; slot += kMsaTileKeys) {
        tile_.num_keys = 0;
        for (int64_t t = slot; t < std::min(slot + kMsaTileKeys, support_.budget) && tokens[t] >= 0; ++t) {
          M3_CHECK(tokens[t] <= position(q), "tokens_TK[{}, {}] is position {}, behind the row's own {}", first_row_ + q,
                   t, tokens[t], position(q));
          k_rows_[tile_.num_keys] = in_.k.row(item_.seq, tokens[t], item_.group);
          v_rows_[tile_.num_keys++] = in_.v.row(item_.seq, tokens[t], item_.group);
        }
        pack_tile();
        push_query(q, 0, tile_.num_keys, 0);
        flush();
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- the tile

  void load_tile(int64_t begin, int num_keys) {
    tile_.begin = begin;
    tile_.num_keys = num_keys;
    in_.k.rows(item_.seq, begin, num_keys, item_.group, k_rows_);
    in_.v.rows(item_.seq, begin, num_keys, item_.group, v_rows_);
    pack_tile();
  }

  void pack_tile() {
    in_.kernels.pack_keys(k_rows_, tile_.num_keys, g_.head_dim, in_.k.dtype(), s_.keys, {});
    in_.kernels.pack_values(v_rows_, tile_.num_keys, g_.head_dim, in_.v.dtype(), s_.values);
    tile_.checked = false;
  }

  // A step with few rows is bound by memory: the keys and values that come next, from position `begin` on (-1: none),
  // are fetched during the multiplications. They lie in one piece where pages do.
  void look_ahead(int64_t begin) {
    ahead_keys_ = ahead_values_ = {};
    if (begin < 0 || num_rows() > kMsaBatchRows || in_.batch.layout != KvLayout::kPaged) return;
    const int64_t bytes = int64_t{std::min(g_.block, kMsaTileKeys)} * g_.head_dim * dtype_bytes(in_.k.dtype());
    ahead_keys_ = {static_cast<const char*>(in_.k.row(item_.seq, begin, item_.group)), bytes};
    ahead_values_ = {static_cast<const char*>(in_.v.row(item_.seq, begin, item_.group)), bytes};
  }

  // Applies the tile to query row q, as far as it sees it.
  void add_query(int q) {
    const int64_t p = position(q);
    if (p < tile_.begin) return;
    const int last = static_cast<int>(std::min<int64_t>(p + 1 - tile_.begin, tile_.num_keys));
    int first = 0, sink = 0;
    if (support_.kind == Kind::kWindow) {
      first = static_cast<int>(std::clamp<int64_t>(p - support_.window + 1 - tile_.begin, 0, last));
      sink = static_cast<int>(std::clamp<int64_t>(support_.sink - tile_.begin, 0, last));
      if (first == last && sink == 0) return;
    }
    const bool whole = last == tile_.num_keys && first <= sink;
    if (!whole && !values_finite()) {
      flush();
      add_query_alone(q, first, last, sink);
    } else {
      push_query(q, first, last, sink);
    }
  }

  // Weight 0 times NaN is NaN, so where values are not finite, those that the row does not see are packed as
  // zeros, for this row alone.
  void add_query_alone(int q, int first, int last, int sink) {
    const void* rows[kMsaTileKeys];
    for (int j = 0; j < tile_.num_keys; ++j) {
      rows[j] = j < last && (j >= first || j < sink) ? v_rows_[j] : kMsaZeroRow;
    }
    in_.kernels.pack_values(rows, tile_.num_keys, g_.head_dim, in_.v.dtype(), s_.values);
    push_query(q, first, last, sink);
    flush();
    in_.kernels.pack_values(v_rows_, tile_.num_keys, g_.head_dim, in_.v.dtype(), s_.values);
  }

  bool values_finite() {
    if (!tile_.checked) tile_.finite = all_finite(v_rows_, tile_.num_keys, g_.head_dim, in_.v.dtype());
    tile_.checked = true;
    return tile_.finite;
  }

  void push_query(int q, int first, int last, int sink) {
    for (int h = 0; h < g_.heads_per_group; ++h) {
      row_ids_[num_pushed_] = (q - item_.q_begin) * g_.heads_per_group + h;
      first_[num_pushed_] = first;
      last_[num_pushed_] = last;
      sink_[num_pushed_] = sink;
      masked_ |= last < tile_.num_keys || first > sink;
      if (++num_pushed_ == kMsaBatchRows) flush();
    }
  }

  void flush() {
    if (num_pushed_ == 0) return;
    MsaAttendTile t;
    t.num_rows = num_pushed_;
    t.row_ids = row_ids_;
    t.q = s_.q;
    t.o = s_.state.o;
    t.m = s_.state.m;
    t.l = s_.state.l;
    t.first = masked_ ? first_ : nullptr;
    t.last = masked_ ? last_ : nullptr;
    t.sink = masked_ ? sink_ : nullptr;
    t.num_keys = *std::max_element(last_, last_ + num_pushed_);
    t.packed_keys = tile_.num_keys;
    t.keys = s_.keys;
    t.values = s_.values;
    t.dim = g_.head_dim;
    t.scale_log2 = g_.logit_scale() * 1.4426950408889634;
    t.ahead_keys = ahead_keys_;
    t.ahead_values = ahead_values_;
    t.scores = s_.scores;
    t.weights = s_.weights;
    in_.kernels.attend_rows(t);
    num_pushed_ = 0;
    masked_ = false;
  }

  const Inputs& in_;
  const MsaGeometry& g_;
  const AttendSupport& support_;
  const AttendItem& item_;
  const Scratch s_;
  int64_t first_position_, first_row_;

  struct {
    int64_t begin = 0;
    int num_keys = 0;
    bool checked = false, finite = false;
  } tile_;
  MsaAhead ahead_keys_, ahead_values_;
  const void *k_rows_[kMsaTileKeys], *v_rows_[kMsaTileKeys];
  int32_t row_ids_[kMsaBatchRows], first_[kMsaBatchRows], last_[kMsaBatchRows], sink_[kMsaBatchRows];
  int num_pushed_ = 0;
  bool masked_ = false;
};

// ------------------------------------------------------------------------------------------------- output

void store_row(const Tensor& o_THD, int64_t row, int dim, const float* o, float factor) {
  if (o_THD.dtype() == DType::kBF16) {
    bf16* out = static_cast<bf16*>(o_THD.data()) + row * dim;
    for (int c = 0; c < dim; ++c) out[c] = bf16(o[c] * factor);
  } else {
    float* out = static_cast<float*>(o_THD.data()) + row * dim;
    for (int c = 0; c < dim; ++c) out[c] = o[c] * factor;
  }
}

float natural_lse(float m, float l) {
  return l == 0 ? -std::numeric_limits<float>::infinity()
                : static_cast<float>(m * 0.6931471805599453 + std::log(static_cast<double>(l)));
}

void Chunk::write() const {
  const int G = g_.heads_per_group, stride = in_.kernels.padded(g_.head_dim);
  if (joins()) end_span(item_.q_begin, item_.q_end);
  const State& sums = joins() ? s_.total : s_.state;
  for (int q = item_.q_begin; q < item_.q_end; ++q) {
    for (int h = 0; h < G; ++h) {
      const int64_t id = int64_t{q - item_.q_begin} * G + h;
      const int64_t row = (first_row_ + q) * g_.heads() + item_.group * G + h;
      const float l = sums.l[id];
      store_row(*in_.args.o_THD, row, g_.head_dim, sums.o + id * stride, l == 0 ? 0.0f : 1.0f / l);
      if (in_.args.lse_TH != nullptr) in_.args.lse_TH[row] = natural_lse(sums.m[id], l);
    }
  }
}

void Chunk::save_partial(const State& partial) const {
  const int stride = in_.kernels.padded(g_.head_dim);
  for (int64_t id = 0; id < num_rows(); ++id) {
    std::memcpy(partial.o + id * g_.head_dim, s_.state.o + id * stride, sizeof(float) * g_.head_dim);
    partial.m[id] = s_.state.m[id];
    partial.l[id] = s_.state.l[id];
  }
}

State partial_at(const AttendPlan& plan, void* workspace, const AttendItem& item) {
  MsaCarver carver(static_cast<char*>(workspace) + item.partial_begin);
  return take_state(carver, int64_t{item.q_end - item.q_begin} * plan.geometry.heads_per_group, plan.geometry.head_dim);
}

// Joins the splits of a chunk, in order.
void merge_splits(const Inputs& in, const AttendItem* items, float* o) {
  const MsaGeometry& g = in.plan.geometry;
  const AttendItem& item = items[0];
  const int G = g.heads_per_group, D = g.head_dim;
  for (int64_t id = 0; id < int64_t{item.q_end - item.q_begin} * G; ++id) {
    float m = -std::numeric_limits<float>::infinity(), l = 0;
    std::fill_n(o, D, 0.0f);
    for (int s = 0; s < item.num_splits; ++s) {
      const State part = partial_at(in.plan, in.args.workspace, items[s]);
      join_span(o, m, l, part.o + id * D, part.m[id], part.l[id], D);
    }
    const int64_t row = (in.batch.q_begin(item.seq) + item.q_begin + id / G) * g.heads() + item.group * G + id % G;
    store_row(*in.args.o_THD, row, D, o, l == 0 ? 0.0f : 1.0f / l);
    if (in.args.lse_TH != nullptr) in.args.lse_TH[row] = natural_lse(m, l);
  }
}

// --------------------------------------------------------------------------------------------------- plan

// Query rows of a chunk. With half as many rows as there are blocks, a block meets 8 rows on average if their selections
// are independent, which pays for packing it; with more, states no longer stay in L2. Fewer where threads would idle.
// Does not show in the results.
int chunk_size(const AttendPlan& plan, const MsaBatch& batch) {
  int64_t max_blocks = 0, max_q_len = 1;
  for (int n = 0; n < batch.num_seqs; ++n) {
    max_blocks = std::max(max_blocks, batch.k_len(n) / plan.geometry.block);
    max_q_len = std::max(max_q_len, batch.q_len(n));
  }
  int64_t chunk = plan.options.support.kind == Kind::kBlocks
                      ? std::clamp<int64_t>(max_blocks / 2, kDenseChunk, kMaxSparseChunk) : kDenseChunk;
  const auto num_items = [&](int64_t size) {
    int64_t count = 0;
    for (int n = 0; n < batch.num_seqs; ++n) count += (batch.q_len(n) + size - 1) / size * plan.geometry.groups;
    return count;
  };
  while (chunk > kMinChunk && num_items(chunk) < int64_t{kItemsPerThread} * plan.num_threads) chunk /= 2;
  const int64_t max_rows = std::max(kMaxChunkRows / plan.geometry.heads_per_group, 1);
  return static_cast<int>(std::min({std::max<int64_t>(chunk, kMinChunk), max_q_len, max_rows}));
}

}  // namespace

void attend_cpu_plan(AttendPlan& plan, const MsaBatch& batch) {
  const MsaGeometry& g = plan.geometry;
  plan.num_threads = num_threads();
  plan.chunk = chunk_size(plan, batch);
  MsaCarver carver(nullptr);
  for (int n = 0; n < batch.num_seqs; ++n) {
    const int64_t q_len = batch.q_len(n);
    const int spans = num_spans(g, plan.options.support, batch.k_len(n));
    const int splits = q_len <= kDecodeQueries ? spans : 1;
    plan.has_spans |= spans > 1 && splits == 1;
    // Late chunks see more keys: they go first.
    for (int64_t q = (q_len - 1) / plan.chunk * plan.chunk; q_len > 0 && q >= 0; q -= plan.chunk) {
      for (int r = 0; r < g.groups; ++r) {
        for (int s = 0; s < splits; ++s) {
          AttendItem item{n, r, static_cast<int32_t>(q), static_cast<int32_t>(std::min(q + plan.chunk, q_len)), s, splits, -1};
          if (splits > 1) {
            item.partial_begin = carver.bytes();
            take_state(carver, int64_t{item.q_end - item.q_begin} * g.heads_per_group, g.head_dim);
          }
          plan.items.push_back(item);
        }
      }
    }
  }
  plan.scratch_begin = carver.bytes();
  for (int t = 0; t < plan.num_threads; ++t) take_scratch(carver, plan);
  plan.workspace_bytes = carver.bytes();
}

void attend_cpu(const AttendPlan& plan, const MsaBatch& batch, const AttendCpuArgs& args) {
  const MsaGeometry& g = plan.geometry;
  const bool bf16_dot = plan.options.compute == MsaCompute::kBF16 && args.q_THD->dtype() == DType::kBF16 &&
                        args.k->dtype() == DType::kBF16;
  const Inputs in = {plan, batch, args, MsaKeys("k", batch, *args.k, g.block, g.groups, g.head_dim),
                     MsaKeys("v", batch, *args.v, g.block, g.groups, g.head_dim), msa_kernels(bf16_dot)};
  const auto scratch_of = [&](int worker) {
    MsaCarver carver(static_cast<char*>(args.workspace) + plan.scratch_begin);
    for (int t = 0; t < worker; ++t) take_scratch(carver, plan);
    return take_scratch(carver, plan);
  };
  const int64_t num_items = static_cast<int64_t>(plan.items.size());
  msa_for_each_item(num_items, plan.num_threads, [&](int64_t i, int worker) {
    const AttendItem& item = plan.items[i];
    Chunk chunk(in, item, scratch_of(worker));
    chunk.run();
    if (item.num_splits > 1) {
      chunk.save_partial(partial_at(plan, args.workspace, item));
    } else {
      chunk.write();
    }
  });
  if (plan.scratch_begin == 0) return;  // no splits
  msa_for_each_item(num_items, plan.num_threads, [&](int64_t i, int worker) {
    const AttendItem& item = plan.items[i];
    if (item.num_splits > 1 && item.split == 0) merge_splits(in, &item, scratch_of(worker).state.o);
  });
}

}  // namespace m3
