// index_select on the CPU. An item is a chunk of query rows (all groups: they share the keys) against a
// range of blocks. Blocks are the outer loop: a tile of keys is packed once and multiplied with all rows
// of the chunk, the maximum over its keys is taken in registers, and every row keeps a sorted list of
// its best blocks. Memory per thread: the chunk's rows, one tile of keys, one list per row.
//
// FLOPs: 2 X per (row, visible history key). A decode step reads every index key once: 2 X bytes each in
// bf16, and 2 R FLOPs per byte.
#include "ops/index_select/index_select_cpu.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "ops/common/msa_kernels.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_workers.h"

namespace m3 {
namespace {

constexpr int kChunkRows = 256;        // (query, group) rows of an item: 128 KB in fp32 at X = 128, beside a 64 KB tile
constexpr int kFewRows = 24, kFewKeys = 32;  // with so few rows, small key tiles that stay in L1 are better
constexpr int kItemsPerThread = 4;     // fewer items than that: the keys are split too
constexpr int kMinBlocksPerItem = 16;
constexpr int kMaxTopk = 128;          // MsaGeometry::check
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Candidate {
  float score;
  int32_t id;
};

// Candidate lists of some rows, each sorted by (score descending, id ascending).
struct Lists {
  Candidate* entries;  // [rows, K]
  int32_t* counts;     // [rows]
};

Lists take_lists(MsaCarver& carver, int64_t rows, int topk) {
  Candidate* entries = carver.take<Candidate>(rows * topk);
  return {entries, carver.take<int32_t>(rows)};
}

// What one thread needs.
struct Scratch {
  uint32_t* rows;       // [rows, X] words
  uint32_t* keys;       // a packed tile
  float* lanes;         // [rows, lanes of a vector] maxima on the way
  float* best;          // [rows] block maxima
  int32_t* last;        // [rows] visible keys of the tile
  Lists lists;
};

Scratch take_scratch(MsaCarver& carver, const MsaGeometry& g) {
  const int64_t rows = std::max(kChunkRows / g.groups, 1) * int64_t{g.groups};
  Scratch s;
  s.rows = carver.take<uint32_t>(rows * g.index_dim);
  s.keys = carver.take<uint32_t>(int64_t{kMsaTileKeys + kMsaMaxPanel} * g.index_dim);
  s.lanes = carver.take<float>(rows * kMsaMaxLanes);
  s.best = carver.take<float>(rows);
  s.last = carver.take<int32_t>(rows);
  s.lists = take_lists(carver, rows, g.topk);
  return s;
}

// Which blocks of a row are forced, scored and wanted; position p >= 0.
struct RowRule {
  int64_t own;             // its own block
  int64_t init, local;     // blocks [0, init) and [local, own] are forced
  int64_t num_scored;      // blocks to be chosen by score among [init, local)
  bool needs_scores;

  RowRule(const MsaGeometry& g, const IndexSelectOptions& options, int64_t p) {
    own = p / g.block;
    local = std::max<int64_t>(own + 1 - g.local, 0);
    init = std::min<int64_t>(g.init, local);
    const int64_t num_forced = own + 1 - local + init;
    num_scored = std::min<int64_t>(g.topk, own + 1) - num_forced;
    needs_scores = num_scored > 0 && (own + 1 > g.topk || options.sel_scores || options.order == SelectOrder::kScore);
  }
};

// Keeps the `limit` best of (score descending, id ascending). Blocks come in ascending order, so an equal score
// goes behind those that are there.
void insert(Candidate* list, int32_t& count, int64_t limit, Candidate candidate) {
  if (count == limit && !(candidate.score > list[count - 1].score)) return;
  int slot = count < limit ? count++ : count - 1;
  for (; slot > 0 && candidate.score > list[slot - 1].score; --slot) list[slot] = list[slot - 1];
  list[slot] = candidate;
}

class Chunk {
 public:
  Chunk(const IndexSelectPlan& plan, const MsaBatch& batch, const IndexSelectCpuArgs& args, const MsaKeys& keys,
        const MsaKernels& kernels, const Scratch& scratch, const IndexSelectItem& item)
      : plan_(plan), g_(plan.geometry), batch_(batch), args_(args), keys_(keys), kernels_(kernels), s_(scratch),
        item_(item), steps_(kernels.steps(g_.index_dim)), first_position_(batch.first_position(item.seq)) {}

  // Fills lists with the best blocks of the item's range.
  void scan(const Lists& lists) const {
    const int64_t num_rows = int64_t{item_.q_end - item_.q_begin} * g_.groups;
    std::fill_n(lists.counts, num_rows, 0);
    const RowRule newest = rule(item_.q_end - 1);
    if (position(item_.q_end - 1) < 0 || !newest.needs_scores) return;
    pack_queries();
    // Positions ascend within the chunk: rows that score a block are those from `first` on.
    int first = item_.q_begin;
    const int64_t end = std::min<int64_t>(item_.b_end, newest.local);
    for (int64_t b = std::max<int64_t>(item_.b_begin, g_.init); b < end; ++b) {
      while (!scores(first, b)) ++first;
      score_block(b, first);
      collect(b, first, lists);
    }
  }

  // Writes the rows' ids and scores from merged lists.
  void write(const Lists& lists) const {
    for (int q = item_.q_begin; q < item_.q_end; ++q) {
      for (int r = 0; r < g_.groups; ++r) {
        const int64_t row = int64_t{q - item_.q_begin} * g_.groups + r;
        write_row(q, r, lists.entries + row * g_.topk);
      }
    }
  }

 private:
  int64_t position(int q) const { return first_position_ + q; }
  RowRule rule(int q) const { return {g_, plan_.options, std::max<int64_t>(position(q), 0)}; }
  bool scores(int q, int64_t b) const {
    const RowRule row = rule(q);
    return position(q) >= 0 && row.needs_scores && b < row.local;
  }

  void pack_queries() const {
    const int64_t begin = (batch_.q_begin(item_.seq) + item_.q_begin) * g_.groups;
    const int64_t num_rows = int64_t{item_.q_end - item_.q_begin} * g_.groups;
    const int64_t row_bytes = g_.index_dim * dtype_bytes(args_.qi_dtype);
    for (int64_t i = 0; i < num_rows; ++i) {
      kernels_.pack_row(static_cast<const char*>(args_.qi_TRX) + (begin + i) * row_bytes, g_.index_dim, args_.qi_dtype,
                        s_.rows + i * steps_);
    }
  }

  // best[..] = maxima of block b for the queries from `first` on.
  void score_block(int64_t b, int first) const {
    const int num_rows = (item_.q_end - first) * g_.groups;
    const bool few = num_rows <= kFewRows;
    const bool pairs = few && kernels_.pack_key_pairs != nullptr && keys_.dtype() == DType::kBF16 && g_.index_dim % 2 == 0;
    const int tile = few ? std::max(kernels_.panel, kFewKeys) : kMsaTileKeys;
    const int64_t begin = b * g_.block, num_keys = batch_.k_len(item_.seq);
    const int64_t end = std::min<int64_t>(begin + g_.block, num_keys);
    const bool masked = g_.local == 0 && position(first) < end - 1;  // it is the own block of some rows
    std::fill_n(s_.best, num_rows, -kInf);
    const void* rows[kMsaTileKeys];
    for (int64_t j = begin; j < end; j += tile) {
      const int count = static_cast<int>(std::min<int64_t>(tile, end - j));
      const auto [ahead_pack, ahead_score] = few ? look_ahead(j + count, count) : std::pair<MsaAhead, MsaAhead>();
      keys_.rows(item_.seq, j, count, 0, rows);
      if (pairs) {
        kernels_.pack_key_pairs(rows, count, g_.index_dim, s_.keys, ahead_pack);
      } else {
        kernels_.pack_keys(rows, count, g_.index_dim, keys_.dtype(), s_.keys, ahead_pack);
      }
      for (int i = 0; masked && i < num_rows; ++i) {
        s_.last[i] = static_cast<int32_t>(std::clamp<int64_t>(position(first + i / g_.groups) + 1 - j, 0, count));
      }
      (pairs ? kernels_.score_max_pairs : kernels_.score_max)(
          s_.rows + int64_t{first - item_.q_begin} * g_.groups * steps_, num_rows, steps_, s_.keys, count,
          masked ? s_.last : nullptr, s_.lanes, s_.best, ahead_score);
    }
  }

  // Few rows are bound by memory: the next tile, of this block or the next one, is fetched while this one is packed
  // (one half) and multiplied (the other).
  std::pair<MsaAhead, MsaAhead> look_ahead(int64_t begin, int count) const {
    if (begin + count > batch_.k_len(item_.seq)) return {};
    const char* at = static_cast<const char*>(keys_.row(item_.seq, begin, 0));
    const int64_t half = int64_t{count} * g_.index_dim * dtype_bytes(keys_.dtype()) / 2;
    return {{at, half}, {at + half, half}};
  }

  void collect(int64_t b, int first, const Lists& lists) const {
    for (int q = first; q < item_.q_end; ++q) {
      const int64_t limit = rule(q).num_scored;
      for (int r = 0; r < g_.groups; ++r) {
        const int64_t row = int64_t{q - item_.q_begin} * g_.groups + r;
        const float score = s_.best[int64_t{q - first} * g_.groups + r] + 0.0f;  // -0 becomes +0
        insert(lists.entries + row * g_.topk, lists.counts[row], limit, {score, static_cast<int32_t>(b)});
      }
    }
  }

  void write_row(int q, int r, const Candidate* list) const {
    Candidate chosen[kMaxTopk];
    int count = 0;
    if (position(q) >= 0) {
      const RowRule row = rule(q);
      for (int64_t b = 0; b < row.init; ++b) chosen[count++] = {kInf, static_cast<int32_t>(b)};
      for (int64_t b = row.local; b <= row.own; ++b) chosen[count++] = {kInf, static_cast<int32_t>(b)};
      for (int64_t i = 0; i < row.num_scored; ++i) {  // without scores: every block that is not forced
        chosen[count++] = row.needs_scores ? list[i] : Candidate{0.0f, static_cast<int32_t>(row.init + i)};
      }
      const auto key = [&](const Candidate& c) {  // ascending ids, or by the tie rule with the own block last
        return plan_.options.order == SelectOrder::kAscending
                   ? std::tuple{false, 0.0f, c.id} : std::tuple{c.id == row.own, -c.score, c.id};
      };
      std::sort(chosen, chosen + count, [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
    }
    std::fill(chosen + count, chosen + g_.topk, Candidate{-kInf, -1});
    const int64_t at = (r * plan_.num_queries + batch_.q_begin(item_.seq) + q) * g_.topk;
    for (int slot = 0; slot < g_.topk; ++slot) {
      args_.ids_RTK[at + slot] = chosen[slot].id;
      if (args_.sel_scores_RTK != nullptr) args_.sel_scores_RTK[at + slot] = chosen[slot].score;
    }
  }

  const IndexSelectPlan& plan_;
  const MsaGeometry& g_;
  const MsaBatch& batch_;
  const IndexSelectCpuArgs& args_;
  const MsaKeys& keys_;
  const MsaKernels& kernels_;
  const Scratch s_;
  const IndexSelectItem& item_;
  int steps_;
  int64_t first_position_;
};

// Lists of an item that shares its chunk with other items.
Lists lists_at(const IndexSelectPlan& plan, void* workspace, const IndexSelectItem& item) {
  MsaCarver carver(static_cast<char*>(workspace) + item.list_begin);
  return take_lists(carver, int64_t{item.q_end - item.q_begin} * plan.geometry.groups, plan.geometry.topk);
}

// Items that cover the same rows lie next to each other; their lists join into those of the first. Blocks ascend
// from item to item, so insert's rule for equal scores holds.
void merge_lists(const IndexSelectPlan& plan, void* workspace, size_t first, size_t end) {
  const IndexSelectItem& leader = plan.items[first];
  const Lists into = lists_at(plan, workspace, leader);
  const int64_t num_rows = int64_t{leader.q_end - leader.q_begin} * plan.geometry.groups;
  for (size_t i = first + 1; i < end; ++i) {
    const Lists from = lists_at(plan, workspace, plan.items[i]);
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int e = 0; e < from.counts[row]; ++e) {
        insert(into.entries + row * plan.geometry.topk, into.counts[row], plan.geometry.topk,
               from.entries[row * plan.geometry.topk + e]);
      }
    }
  }
}

}  // namespace

void index_select_cpu_plan(IndexSelectPlan& plan, const MsaBatch& batch) {
  const MsaGeometry& g = plan.geometry;
  plan.num_threads = num_threads();
  const int chunk = std::max(kChunkRows / g.groups, 1);
  int64_t num_chunks = 0;
  for (int n = 0; n < batch.num_seqs; ++n) num_chunks += (batch.q_len(n) + chunk - 1) / chunk;
  const int64_t wanted = int64_t{kItemsPerThread} * plan.num_threads;
  const int64_t max_ranges = num_chunks > 0 && plan.num_threads > 1 ? (wanted + num_chunks - 1) / num_chunks : 1;

  MsaCarver carver(nullptr);
  for (int n = 0; n < batch.num_seqs; ++n) {
    const int64_t q_len = batch.q_len(n), num_blocks = (batch.k_len(n) + g.block - 1) / g.block;
    const int64_t ranges = std::clamp<int64_t>(num_blocks / kMinBlocksPerItem, 1, max_ranges);
    for (int64_t q = 0; q < q_len; q += chunk) {
      const int32_t q_end = static_cast<int32_t>(std::min<int64_t>(q + chunk, q_len));
      for (int64_t i = 0; i < ranges; ++i) {
        const int64_t list_begin = ranges > 1 ? carver.bytes() : -1;
        if (ranges > 1) take_lists(carver, (q_end - q) * g.groups, g.topk);
        plan.items.push_back({n, static_cast<int32_t>(q), q_end, static_cast<int32_t>(num_blocks * i / ranges),
                              static_cast<int32_t>(num_blocks * (i + 1) / ranges), list_begin});
      }
    }
  }
  plan.scratch_begin = carver.bytes();
  for (int t = 0; t < plan.num_threads; ++t) take_scratch(carver, g);
  plan.workspace_bytes = carver.bytes();
}

void index_select_cpu(const IndexSelectPlan& plan, const MsaBatch& batch, const IndexSelectCpuArgs& args) {
  const MsaGeometry& g = plan.geometry;
  const MsaKeys keys("ki", batch, *args.ki, g.block, 0, g.index_dim);
  const MsaKernels& kernels = msa_kernels(args.qi_dtype == DType::kBF16 && keys.dtype() == DType::kBF16);
  const int64_t num_items = static_cast<int64_t>(plan.items.size());
  const auto scratch_of = [&](int worker) {
    MsaCarver carver(static_cast<char*>(args.workspace) + plan.scratch_begin);
    for (int t = 0; t < worker; ++t) take_scratch(carver, g);
    return take_scratch(carver, g);
  };
  msa_for_each_item(num_items, plan.num_threads, [&](int64_t i, int worker) {
    const IndexSelectItem& item = plan.items[i];
    const Scratch scratch = scratch_of(worker);
    const Chunk chunk(plan, batch, args, keys, kernels, scratch, item);
    if (item.list_begin >= 0) {
      chunk.scan(lists_at(plan, args.workspace, item));
    } else {
      chunk.scan(scratch.lists);
      chunk.write(scratch.lists);
    }
  });
  if (plan.scratch_begin == 0) return;  // every item had its rows for itself
  msa_for_each_item(num_items, plan.num_threads, [&](int64_t i, int worker) {
    const IndexSelectItem& item = plan.items[i];
    if (item.list_begin < 0 || item.b_begin > 0) return;  // not the first of a chunk's items
    int64_t end = i + 1;
    while (end < num_items && plan.items[end].b_begin > 0) ++end;
    merge_lists(plan, args.workspace, i, end);
    Chunk(plan, batch, args, keys, kernels, scratch_of(worker), item).write(lists_at(plan, args.workspace, item));
  });
}

}  // namespace m3
