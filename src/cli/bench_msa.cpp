// m3 bench msa: one attention layer of M3's geometry over a paged cache, each kind of attention in the
// same run, against the arithmetic and bandwidth ceilings of this machine measured in the same run.
//
// Times are of the whole operator from queries to O: plan, index scores, selection, attention
// (hopper.md §9). FLOPs are exact visible pairs, bytes the least that must be read (msa.md §13). Decode steps
// rotate over several caches, so that none finds its keys in the CPU's caches.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "cli/bench_msa_cuda.h"
#include "cli/options.h"
#include "ops/attend/attend.h"
#include "ops/dsa_select/dsa_select.h"
#include "ops/index_select/index_select.h"
#include "tensor/arena.h"

namespace m3::cli {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kBudget = 2048;                      // keys per query of the sparse kinds: 16 blocks of 128
constexpr int64_t kSink = 128;                         // of the window: its first block
constexpr int kDsaHeads = 64;
constexpr int64_t kColdBytes = int64_t{256} << 20;     // read between two visits of the same cache, at least
constexpr int64_t kMostCacheBytes = int64_t{3} << 30;  // of all caches together, unless one alone is larger
constexpr int64_t kDecodeNew = 16;                     // up to so many new tokens are measured as a decode step

struct MsaFlags {
  std::string context = "8192,32768", attention = "msa,full", dtype = "bf16", device = "cpu", workload, json;
  int64_t num_new = 0, runs = 3, steps = 24;
  int threads = 0;
  double rho = 0;
};

// Random values by copying stretches of a table: as irregular as the operators can notice, and fast.
class RandomRows {
 public:
  explicit RandomRows(uint64_t seed) : rng_(seed), table_(1 << 18) {
    for (float& x : table_) x = static_cast<float>(rng_.normal());
  }
  const float* next(int64_t count) { return table_.data() + rng_.below(table_.size() - count); }
  void fill(const Tensor& tensor) {
    const int64_t width = tensor.dim(tensor.rank() - 1);
    for (int64_t row = 0; row < tensor.numel() / width; ++row) put(tensor, row * width, next(width), width);
  }
  // Neighbouring rows of axis 0 are alike: x = rho x + sqrt(1 - rho^2) noise.
  void fill_correlated(const Tensor& tensor, double rho) {
    const int64_t width = tensor.numel() / std::max<int64_t>(tensor.dim(0), 1);
    std::vector<float> row(width);
    for (int64_t t = 0; t < tensor.dim(0); ++t) {
      const float* noise = next(width);
      const float keep = static_cast<float>(t == 0 ? 0 : rho), add = std::sqrt(1 - keep * keep);
      for (int64_t c = 0; c < width; ++c) row[c] = keep * row[c] + add * noise[c];
      put(tensor, t * width, row.data(), width);
    }
  }

 private:
  static void put(const Tensor& tensor, int64_t at, const float* from, int64_t count) {
    if (tensor.dtype() == DType::kBF16) {
      for (int64_t i = 0; i < count; ++i) tensor.ptr<bf16>()[at + i] = bf16(from[i]);
    } else {
      std::copy_n(from, count, tensor.ptr<float>() + at);
    }
  }
  Philox rng_;
  std::vector<float> table_;
};

struct Cost {
  double index_flop = 0, attend_flop = 0, bytes = 0;
};

// Work of `num_new` query rows at the end of `context` keys.
Cost cost_of(const std::string& kind, const MsaGeometry& g, int64_t context, int64_t num_new, int64_t value_bytes) {
  double pairs = 0, scored = 0;  // visible (query, key) pairs per head; scored ones per index head
  for (int64_t p = context - num_new; p < context; ++p) {
    const int64_t own = p / g.block;
    int64_t keys = p + 1;
    if (kind == "msa" && own >= g.topk) keys = (g.topk - 1) * int64_t{g.block} + p % g.block + 1;
    if (kind == "window" || kind == "dsa") keys = std::min(keys, kBudget);
    pairs += static_cast<double>(keys);
    if (kind == "msa" && own >= g.topk) scored += static_cast<double>(own * g.block);
    if (kind == "dsa" && p >= kBudget) scored += static_cast<double>(p + 1);
  }
  const int index_heads = kind == "dsa" ? kDsaHeads : g.groups;
  const double row_bytes = 2.0 * g.groups * g.head_dim * value_bytes;  // K and V of one position
  return {.index_flop = 2.0 * index_heads * g.index_dim * scored,
          .attend_flop = 4.0 * g.heads() * g.head_dim * pairs,
          .bytes = row_bytes * pairs / num_new + (scored > 0 ? static_cast<double>(context) * g.index_dim * value_bytes : 0)};
}

// A layer's inputs: `num_caches` sequences of `context` tokens in one pool of pages.
class Layer {
 public:
  Layer(const MsaFlags& flags, const MsaGeometry& g, int64_t context, int64_t num_new, int64_t num_caches)
      : g_(g), context_(context), num_new_(num_new), dtype_(flags.dtype == "f32" ? DType::kF32 : DType::kBF16) {
    const int64_t blocks = (context + g.block - 1) / g.block, num_pages = blocks * num_caches;
    arena_ = Arena("bench", bytes_needed(num_pages));
    RandomRows random(1);
    k_ = arena_.alloc("k", dtype_, {num_pages, g.groups, g.block, g.head_dim});
    v_ = arena_.alloc("v", dtype_, {num_pages, g.groups, g.block, g.head_dim});
    x_ = arena_.alloc("x", dtype_, {num_pages, g.block, g.index_dim});
    q_ = arena_.alloc("q", dtype_, {num_new, g.heads(), g.head_dim});
    qi_ = arena_.alloc("qi", dtype_, {num_new, g.groups, g.index_dim});
    qx_ = arena_.alloc("qx", dtype_, {num_new, kDsaHeads, g.index_dim});
    wx_ = arena_.alloc("wx", DType::kF32, {num_new, kDsaHeads});
    o_ = arena_.alloc("o", dtype_, q_.shape());
    for (const Tensor& t : {k_, v_, x_, q_, qx_, wx_}) random.fill(t);
    random.fill_correlated(qi_, flags.rho);
    ids_ = arena_.alloc("ids", DType::kI32, {g.groups, num_new, g.topk});
    tokens_ = arena_.alloc("tokens", DType::kI32, {num_new, kBudget});
    for (int64_t i = 0; i < num_pages; ++i) table_.push_back(static_cast<int32_t>(i));
    Philox rng(2);
    for (int64_t i = num_pages - 1; i > 0; --i) std::swap(table_[i], table_[rng.below(i + 1)]);
    cu_q_ = {0, static_cast<int32_t>(num_new)};
    seq_len_ = static_cast<int32_t>(context);
    blocks_ = blocks;
  }

  struct Seconds {
    double index = 0, attend = 0;
    double total() const { return index + attend; }
  };

  // One call of the whole operator over cache number `cache`.
  Seconds run(const std::string& kind, int64_t cache) {
    const MsaBatch batch{.layout = KvLayout::kPaged, .num_seqs = 1, .num_queries = num_new_, .cu_q = cu_q_.data(),
                         .seq_lens = &seq_len_, .page_table = table_.data() + cache * blocks_, .max_pages = blocks_};
    const ArenaScope scope(arena_);
    const auto start = std::chrono::steady_clock::now();
    AttendOptions options;
    Tensor lists;
    if (kind == "msa") {
      const IndexSelectPlan plan = index_select_plan(g_, batch, {});
      index_select(plan, batch, qi_, x_, ids_, {}, arena_.alloc_bytes("workspace", plan.workspace_bytes));
      lists = ids_;
    } else if (kind == "dsa") {
      const DsaGeometry dsa{.heads = kDsaHeads, .index_dim = g_.index_dim, .block = g_.block, .budget = kBudget};
      const DsaSelectPlan plan = dsa_select_plan(dsa, batch);
      dsa_select(plan, batch, qx_, x_, wx_, tokens_, arena_.alloc_bytes("workspace", plan.workspace_bytes));
      lists = tokens_;
      options.support = AttendSupport::tokens(kBudget);
    } else {
      options.support = kind == "window" ? AttendSupport::sliding(kBudget - kSink, kSink) : AttendSupport::full();
    }
    const auto middle = std::chrono::steady_clock::now();
    const AttendPlan plan = attend_plan(g_, batch, options);
    attend(plan, batch, q_, k_, v_, lists, o_, {}, arena_.alloc_bytes("workspace", plan.workspace_bytes));
    const auto end = std::chrono::steady_clock::now();
    return {std::chrono::duration<double>(middle - start).count(), std::chrono::duration<double>(end - middle).count()};
  }

 private:
  int64_t bytes_needed(int64_t num_pages) const {
    const int64_t element = dtype_bytes(dtype_);
    const int64_t page = g_.block * (2 * g_.groups * g_.head_dim + g_.index_dim) * element;
    const int64_t row = (2 * g_.heads() * g_.head_dim + (g_.groups + kDsaHeads) * g_.index_dim) * element +
                        4 * (kDsaHeads + g_.groups * g_.topk + kBudget);
    return num_pages * page + num_new_ * row + (int64_t{2} << 30);  // and workspaces: untouched pages cost nothing
  }

  MsaGeometry g_;
  int64_t context_, num_new_, blocks_ = 0;
  DType dtype_;
  Arena arena_;
  Tensor k_, v_, x_, q_, qi_, qx_, wx_, o_, ids_, tokens_;
  std::vector<int32_t> table_, cu_q_;
  int32_t seq_len_ = 0;
};

// Prefill: the fastest run. Decode: the median step, over rotating caches, after one round of warming up.
Layer::Seconds measure(Layer& layer, const std::string& kind, const MsaFlags& flags, bool decode, int64_t num_caches) {
  std::vector<Layer::Seconds> runs;
  const int64_t warm_up = decode ? std::min<int64_t>(num_caches, 5) : 0, count = decode ? flags.steps : flags.runs;
  for (int64_t i = 0; i < warm_up + count; ++i) {
    const Layer::Seconds seconds = layer.run(kind, i % num_caches);
    if (i >= warm_up) runs.push_back(seconds);
  }
  std::sort(runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.total() < b.total(); });
  return runs[decode ? runs.size() / 2 : 0];
}

std::vector<std::string> parse_kinds(const std::string& text) {
  std::vector<std::string> kinds;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    kinds.push_back(text.substr(begin, end - begin));
    const std::string& kind = kinds.back();
    if (kind != "msa" && kind != "full" && kind != "window" && kind != "dsa") {
      throw UsageError{"--attention: '" + kind + "' is unknown, want a list of msa, full, window, dsa"};
    }
    begin = end + 1;
  }
  return kinds;
}

MsaFlags parse(const Args& args) {
  MsaFlags flags;
  Options options("bench msa",
                  "Times one attention layer of M3's geometry (64 heads, 4 groups, blocks of 128) for each kind of "
                  "attention, beside the ceilings of this machine measured in the same run.",
                  "m3 bench msa --context 32768,131072 --new 1 --attention msa,full");
  options.add("--context", flags.context, "keys of the sequence, new tokens included: a list");
  options.add("--new", flags.num_new, "query tokens at its end (0: all, a prefill; up to 16: a decode step)");
  options.add("--attention", flags.attention, "kinds to compare: a list of msa, full, window, dsa");
  options.choice("--dtype", flags.dtype, {"bf16", "f32"}, "inputs, cache and arithmetic");
  options.choice("--device", flags.device, {"cpu", "cuda"}, "where it runs; cuda: msa and full in bf16, one CUDA graph a call");
  options.add("--workload", flags.workload, "with --device cuda: the cases of this file (prefill_shapes.json) instead of --context");
  options.add("--rho", flags.rho, "correlation of neighbouring index queries");
  options.add("--runs", flags.runs, "runs of a prefill; on a GPU of every case");
  options.add("--steps", flags.steps, "steps of a decode");
  options.threads(flags.threads);
  options.add("--json", flags.json, "write the results to this file");
  options.parse(args);
  if (flags.runs < 1 || flags.steps < 1 || flags.num_new < 0 || flags.rho < 0 || flags.rho >= 1) {
    throw UsageError{"--runs and --steps must be at least 1, --new at least 0, --rho in [0, 1)"};
  }
  return flags;
}

}  // namespace

int bench_msa(const Args& args) {
  const MsaFlags flags = parse(args);
  const std::vector<std::string> kinds = parse_kinds(flags.attention);
  const std::vector<int64_t> contexts = parse_numbers("--context", flags.context);
  set_num_threads(flags.threads);
  if (flags.device == "cuda") {
    return bench_msa_cuda({.contexts = contexts, .kinds = kinds, .num_new = flags.num_new, .workload = flags.workload,
                           .rho = flags.rho, .rounds = flags.runs, .json = flags.json}, args);
  }
  if (!flags.workload.empty()) throw UsageError{"--workload needs --device cuda"};
  for (const int64_t context : contexts) {
    if (context < std::max<int64_t>(flags.num_new, 1)) throw UsageError{"--context must not be smaller than --new"};
  }
  const MsaGeometry g = msa_geometry_m3();
  const int64_t value_bytes = flags.dtype == "f32" ? 4 : 2;
  const MachineCeiling ceiling = measure_machine_ceiling();
  const double gflops = value_bytes == 2 ? std::max(ceiling.bf16_gflops, ceiling.fp32_gflops) : ceiling.fp32_gflops;
  fmt::print("ceiling: {:.0f} GFLOP/s, {:.1f} GB/s on {} threads\n", gflops, ceiling.read_gb_s, num_threads());

  ordered_json results = ordered_json::array();
  for (const int64_t context : contexts) {
    const int64_t num_new = flags.num_new == 0 ? context : flags.num_new;
    const bool decode = num_new <= kDecodeNew;
    const int64_t cache_bytes = context * (2 * g.groups * g.head_dim + g.index_dim) * value_bytes;
    const double step_bytes = cost_of("msa", g, context, num_new, value_bytes).bytes;
    const int64_t wanted = decode ? static_cast<int64_t>(kColdBytes / step_bytes) + 1 : 1;
    const int64_t num_caches = std::clamp<int64_t>(kMostCacheBytes / cache_bytes, 1, wanted);
    Layer layer(flags, g, context, num_new, num_caches);
    double msa_seconds = 0;
    for (const std::string& kind : kinds) {
      const Layer::Seconds seconds = measure(layer, kind, flags, decode, num_caches);
      const Cost cost = cost_of(kind, g, context, num_new, value_bytes);
      const double flop = cost.index_flop + cost.attend_flop;
      const double compute_bound = flop / gflops / 1e9, memory_bound = decode ? cost.bytes / ceiling.read_gb_s / 1e9 : 0;
      const double bound = std::max(compute_bound, memory_bound);
      if (kind == "msa") msa_seconds = seconds.total();
      fmt::print("{} {:>8} + {:<6} {:<7} {:10.3f} ms (index {:.3f}, attend {:.3f})  {:6.1f} GFLOP/s  {:5.1f} GB/s  {:3.0f} % of the {} bound{}\n",
                 decode ? "decode " : "prefill", context - num_new, num_new, kind, seconds.total() * 1e3, seconds.index * 1e3,
                 seconds.attend * 1e3, flop / seconds.total() / 1e9, cost.bytes * (decode ? 1 : 0) / seconds.total() / 1e9,
                 100 * bound / seconds.total(), compute_bound > memory_bound ? "arithmetic" : "memory",
                 msa_seconds > 0 && kind != "msa" ? fmt::format(", {:.2f} x msa", seconds.total() / msa_seconds) : "");
      std::fflush(stdout);
      results.push_back({{"what", decode ? "decode" : "prefill"}, {"context", context}, {"new", num_new}, {"attention", kind},
                         {"ms", seconds.total() * 1e3}, {"index_ms", seconds.index * 1e3}, {"attend_ms", seconds.attend * 1e3},
                         {"index_flop", cost.index_flop}, {"attend_flop", cost.attend_flop},
                         {"gflops", flop / seconds.total() / 1e9}, {"least_bytes", decode ? cost.bytes : 0.0},
                         {"arithmetic_bound_ms", compute_bound * 1e3}, {"memory_bound_ms", memory_bound * 1e3},
                         {"share_of_bound", bound / seconds.total()}, {"caches", num_caches}});
    }
  }
  if (!flags.json.empty()) {
    ordered_json document = bench_head("bench msa", args, ceiling);
    document["settings"] = {{"dtype", flags.dtype}, {"rho", flags.rho}, {"runs", flags.runs}, {"steps", flags.steps}};
    document["results"] = results;
    write_file_atomic(flags.json, document.dump(1) + "\n");
  }
  return 0;
}

}  // namespace m3::cli
