// m3 bench msa-train: forward and backward of one attention layer over one packed document, sparse against full,
// in turns, so that both see the same state of a shared machine. Medians of the rounds.
//
// The layer has M3's heads and blocks (msa.md §2), and one of its four groups unless told otherwise: groups are
// independent, so the ratio stays. FLOPs: exact visible pairs, forward 1x, backward 2.5x; the index as training.md §18.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "ops/attend/attend.h"
#include "ops/attend_backward/attend_backward.h"
#include "ops/index_kl/index_kl.h"
#include "ops/index_select/index_select.h"
#include "tensor/arena.h"

namespace m3::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

struct Flags {
  std::string context = "8192", dtype = "bf16", json;
  int64_t rounds = 5, groups = 1;
  int threads = 0;
};

// Parts of one forward and backward, in seconds.
struct Parts {
  double select = 0, forward = 0, backward = 0, kl = 0;
  double attention() const { return select + forward + backward; }
  double total() const { return attention() + kl; }
};

double lap(Clock::time_point& since) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - since).count();
  since = now;
  return seconds;
}

class Layer {
 public:
  Layer(const MsaGeometry& g, int64_t length, DType dtype)
      : g_(g), arena_("bench", bytes_needed(g, length)) {
    const int64_t T = length, H = g.heads(), R = g.groups, D = g.head_dim, X = g.index_dim;
    cu_ = {0, static_cast<int32_t>(T)};
    batch_.num_seqs = 1;
    batch_.num_queries = batch_.max_q_len = batch_.max_k_len = T;
    batch_.cu_q = batch_.cu_k = cu_.data();
    Philox rng(1);
    const auto draw = [&](const char* name, const Shape& shape) {
      const Tensor t = arena_.alloc(name, dtype, shape);
      for (int64_t i = 0; i < t.numel(); ++i) {
        const auto value = static_cast<float>(rng.normal());
        if (dtype == DType::kBF16) {
          t.ptr<bf16>()[i] = bf16(value);
        } else {
          t.ptr<float>()[i] = value;
        }
      }
      return t;
    };
    q_ = draw("q", {T, H, D});
    k_ = draw("k", {T, R, D});
    v_ = draw("v", {T, R, D});
    do_ = draw("do", {T, H, D});
    qi_ = draw("qi", {T, R, X});
    ki_ = draw("ki", {T, X});
    const auto alloc = [&](const char* name, DType type, const Shape& shape) {
      return arena_.alloc(name, type, shape);
    };
    o_ = alloc("o", dtype, {T, H, D});
    dq_ = alloc("dq", dtype, {T, H, D});
    dk_ = alloc("dk", dtype, {T, R, D});
    dv_ = alloc("dv", dtype, {T, R, D});
    dqi_ = alloc("dqi", dtype, {T, R, X});
    dki_ = alloc("dki", dtype, {T, X});
    lse_ = alloc("lse", DType::kF32, {T, H});
    kl_ = alloc("kl", DType::kF32, {R, T});
    ids_ = alloc("ids", DType::kI32, {R, T, g.topk});
  }

  Parts run(bool sparse) {
    Parts parts;
    const AttendOptions options{.support = sparse ? AttendSupport() : AttendSupport::full()};
    const Tensor lists = sparse ? ids_ : Tensor();
    auto since = Clock::now();
    if (sparse) {
      const IndexSelectPlan plan = index_select_plan(g_, batch_, {});
      with_workspace(plan.workspace_bytes,
                     [&](void* w) { index_select(plan, batch_, qi_, ki_, ids_, {}, w); });
      parts.select = lap(since);
    }
    const AttendPlan forward = attend_plan(g_, batch_, options);
    with_workspace(forward.workspace_bytes,
                   [&](void* w) { attend(forward, batch_, q_, k_, v_, lists, o_, lse_, w); });
    parts.forward = lap(since);
    const AttendBackwardPlan backward = attend_backward_plan(g_, batch_, options.support);
    with_workspace(backward.workspace_bytes, [&](void* w) {
      attend_backward(backward, batch_, {q_, k_, v_, lists, o_, lse_, do_, {}}, dq_, dk_, dv_, w);
    });
    parts.backward = lap(since);
    if (sparse) {
      const IndexKlPlan plan = index_kl_plan(g_, batch_, options.support);
      const double weight = 1.0 / static_cast<double>(batch_.num_queries * g_.groups);
      with_workspace(plan.workspace_bytes, [&](void* w) {
        index_kl(plan, batch_, weight, {q_, k_, lse_, qi_, ki_, ids_}, {dqi_, dki_, kl_, {}}, w);
      });
      parts.kl = lap(since);
    }
    return parts;
  }

 private:
  template <class Run>
  void with_workspace(int64_t bytes, Run&& run) {
    const ArenaScope scope(arena_);
    run(arena_.alloc_bytes("workspace", bytes));
  }
  static int64_t bytes_needed(const MsaGeometry& g, int64_t length) {
    const int64_t row = 4 * (4 * g.heads() * g.head_dim + 8 * g.groups * g.head_dim +
                             4 * g.groups * g.index_dim + 4 * g.topk * g.groups);
    return length * row + (int64_t{4} << 30);  // workspaces: untouched pages cost nothing
  }

  MsaGeometry g_;
  Arena arena_;
  std::vector<int32_t> cu_;
  MsaBatch batch_;
  Tensor q_, k_, v_, do_, qi_, ki_, o_, dq_, dk_, dv_, dqi_, dki_, lse_, kl_, ids_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double median_of(const std::vector<Parts>& rounds, double (*value)(const Parts&)) {
  std::vector<double> values;
  for (const Parts& parts : rounds) values.push_back(value(parts));
  return median(values);
}

// Visible (query, key) pairs of a head; scored ones of an index head (msa.md §13).
struct Pairs {
  double visible = 0, scored = 0;
};
Pairs pairs_of(const MsaGeometry& g, int64_t length, bool sparse) {
  Pairs pairs;
  for (int64_t p = 0; p < length; ++p) {
    const int64_t own = p / g.block;
    const bool selects = sparse && own >= g.topk;
    pairs.visible +=
        static_cast<double>(selects ? (g.topk - 1) * int64_t{g.block} + p % g.block + 1 : p + 1);
    if (selects) pairs.scored += static_cast<double>(own * g.block);
  }
  return pairs;
}

ordered_json row_of(const MsaGeometry& g, int64_t length, bool sparse,
                    const std::vector<Parts>& rounds) {
  const Pairs pairs = pairs_of(g, length, sparse);
  const double flop = 4.0 * g.heads() * g.head_dim * pairs.visible * 3.5 +
                      2.0 * g.groups * g.index_dim * pairs.scored;
  const double attention = median_of(rounds, [](const Parts& p) { return p.attention(); });
  std::vector<double> totals;
  for (const Parts& parts : rounds) totals.push_back(parts.total() * 1e3);
  return {{"attention", sparse ? "msa" : "full"},
          {"context", length},
          {"ms", attention * 1e3},
          {"select_ms", median_of(rounds, [](const Parts& p) { return p.select * 1e3; })},
          {"forward_ms", median_of(rounds, [](const Parts& p) { return p.forward * 1e3; })},
          {"backward_ms", median_of(rounds, [](const Parts& p) { return p.backward * 1e3; })},
          {"kl_ms", median_of(rounds, [](const Parts& p) { return p.kl * 1e3; })},
          {"ms_with_kl", median(totals)},
          {"rounds_ms_with_kl", totals},
          {"flop", flop},
          {"gflops", flop / attention * 1e-9}};
}

}  // namespace

int bench_msa_train(const Args& args) {
  Flags flags;
  Options options("bench msa-train",
                  "Times forward and backward of one attention layer of M3's geometry over one "
                  "document: sparse (selection, "
                  "attention, its backward, the index loss) and full, in turns; medians.",
                  "m3 bench msa-train --context 4096,8192 --rounds 5");
  options.add("--context", flags.context, "tokens of the document: a list");
  options.add("--groups", flags.groups, "groups of 16 query heads and one KV head (M3: 4)");
  options.add("--rounds", flags.rounds, "of each kind, in turns, behind one to warm up");
  options.choice("--dtype", flags.dtype, {"bf16", "f32"}, "inputs and arithmetic");
  options.threads(flags.threads);
  options.add("--json", flags.json, "write the results to this file");
  options.parse(args);
  if (flags.rounds < 1 || flags.groups < 1 || flags.groups > 64)
    throw UsageError{"--rounds must be at least 1, --groups 1 to 64"};
  set_num_threads(flags.threads);
  MsaGeometry g = msa_geometry_m3();
  g.groups = static_cast<int>(flags.groups);
  const CeilingWatch ceiling;
  ordered_json results = ordered_json::array();
  for (const int64_t length : parse_numbers("--context", flags.context)) {
    if (length < 1 || length > (1 << 20)) throw UsageError{"--context must be 1 to 1048576"};
    Layer layer(g, length, flags.dtype == "f32" ? DType::kF32 : DType::kBF16);
    std::vector<Parts> rounds[2];
    for (int64_t round = 0; round <= flags.rounds; ++round) {
      for (const bool sparse : {true, false}) {
        const Parts parts = layer.run(sparse);
        if (round > 0) rounds[sparse].push_back(parts);
      }
    }
    const ordered_json msa = row_of(g, length, true, rounds[1]),
                       full = row_of(g, length, false, rounds[0]);
    for (const ordered_json& row : {msa, full}) {
      fmt::print(
          "{:>8} {:<5} {:10.1f} ms (select {:.1f}, forward {:.1f}, backward {:.1f}), with index "
          "loss {:.1f} ms, {:.1f} GFLOP/s\n",
          length, row["attention"].get<std::string>(), row["ms"].get<double>(),
          row["select_ms"].get<double>(), row["forward_ms"].get<double>(),
          row["backward_ms"].get<double>(), row["ms_with_kl"].get<double>(),
          row["gflops"].get<double>());
      results.push_back(row);
    }
    const double full_ms = full["ms"].get<double>();
    fmt::print("{:>8} full / msa: {:.2f}, with the index loss {:.2f}\n", length,
               full_ms / msa["ms"].get<double>(), full_ms / msa["ms_with_kl"].get<double>());
  }
  if (!flags.json.empty()) {
    ordered_json document = bench_head("bench msa-train", args, ceiling.first());
    document["results"] = results;
    write_file_atomic(flags.json, document.dump(1) + "\n");
  }
  return 0;
}

}  // namespace m3::cli
