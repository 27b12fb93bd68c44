// The MSA operators on one GPU, geometry of M3, bf16, paged cache: one CUDA graph per call, cold
// inputs (calls rotate over input sets that lie at least 512 MB apart, or over 8), medians with p10
// and p90. "whole" is the operator from queries to O, planning included (hopper.md §9). FLOPs are
// exact visible pairs.
//
// --workload reads benchmarks/workloads/prefill_shapes.json and adds the mean over its weights.
#include "cli/bench_msa_cuda.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "ops/attend/attend.h"
#include "ops/attend/attend_cuda.h"
#include "ops/index_select/index_select.h"
#include "ops/index_select/index_select_cuda.h"
#include "tensor/arena.h"
#include "tensor/device_graph.h"

namespace m3::cli {
namespace {

using nlohmann::ordered_json;

constexpr Device kGpu{DeviceKind::kCuda, 0};
constexpr double kColdBytes = 512e6;
constexpr int kMaxSets = 8, kWarmUps = 3;
constexpr int64_t kTableValues = int64_t{1} << 22;

struct Sequence {
  int64_t num_new, context;  // query tokens at the end of so many keys
};

struct Case {
  std::string id;
  std::vector<Sequence> sequences;
  double weight = 0;
};

// Unit normals in device memory, from which inputs are copied in stretches.
class NormalTable {
 public:
  NormalTable()
      : host_(kTableValues), arena_("normals", kTableValues * 2 + Arena::kAlignment, kGpu) {
    parallel_for(kTableValues, [&](int64_t begin, int64_t end) {
      Philox rng(3, 0, static_cast<uint64_t>(begin) * 4);
      for (int64_t i = begin; i < end; ++i) host_[i] = bf16(static_cast<float>(rng.normal()));
    });
    values_ = arena_.alloc("normals", DType::kBF16, {kTableValues});
    copy(Tensor(host_.data(), DType::kBF16, {kTableValues}), values_);
    synchronize({}, kGpu);
  }

  // Every stretch begins elsewhere in the table, so that no two rows of a tensor are the same row.
  void fill(const Tensor& tensor) {
    const int64_t count = tensor.numel();
    for (int64_t at = 0; at < count;) {
      const int64_t skip = static_cast<int64_t>(rng_.below(kTableValues / 16)) * 8 + 8;
      const int64_t length = std::min(count - at, kTableValues - skip);
      copy(piece(values_, skip, length), piece(tensor, at, length));
      at += length;
    }
  }
  // Rows [T, width] with x = rho x_before + sqrt(1 - rho^2) noise.
  void fill_correlated(const Tensor& tensor, double rho) {
    if (rho == 0) return fill(tensor);
    const int64_t rows = tensor.dim(0), width = tensor.numel() / std::max<int64_t>(rows, 1);
    std::vector<bf16> out(tensor.numel());
    const auto keep = static_cast<float>(rho), add = static_cast<float>(std::sqrt(1 - rho * rho));
    const int64_t start = static_cast<int64_t>(rng_.below(kTableValues));
    parallel_for(width, [&](int64_t begin, int64_t end) {
      std::vector<float> x(end - begin, 0.0f);
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t c = begin; c < end; ++c) {
          const float noise = to_float(host_[(start + t * width + c) % (kTableValues - 1)]);
          float& value = x[c - begin];
          value = t == 0 ? noise : keep * value + add * noise;
          out[t * width + c] = bf16(value);
        }
      }
    });
    copy(Tensor(out.data(), DType::kBF16, tensor.shape()), tensor);
    synchronize({}, kGpu);
  }

 private:
  static Tensor piece(const Tensor& tensor, int64_t begin, int64_t count) {
    return Tensor(static_cast<char*>(tensor.data()) + begin * dtype_bytes(DType::kBF16),
                  DType::kBF16, {count}, kGpu);
  }
  std::vector<bf16> host_;
  Arena arena_;
  Tensor values_;
  Philox rng_{4};
};

struct InputSet {
  Tensor q, k, v, qi, x, o;
};

// The inputs of one case in device memory.
class Workload {
 public:
  Workload(const Case& c, double rho, NormalTable& normals) : case_(c), g_(msa_geometry_m3()) {
    const int64_t B = g_.block;
    std::vector<int32_t> cu{0}, lens;
    int64_t num_pages = 0;
    for (const Sequence& s : c.sequences) {
      cu.push_back(cu.back() + static_cast<int32_t>(s.num_new));
      lens.push_back(static_cast<int32_t>(s.context));
      num_pages += (s.context + B - 1) / B;
      batch_.max_q_len = std::max(batch_.max_q_len, s.num_new);
      batch_.max_k_len = std::max(batch_.max_k_len, s.context);
    }
    batch_.layout = KvLayout::kPaged;
    batch_.num_seqs = static_cast<int>(lens.size());
    batch_.num_queries = cu.back();
    batch_.max_pages = (batch_.max_k_len + B - 1) / B;
    const int64_t T = batch_.num_queries;
    std::vector<int32_t> order(num_pages), table(lens.size() * batch_.max_pages, -1);
    std::iota(order.begin(), order.end(), 0);
    Philox rng(1);
    for (int64_t i = num_pages - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);
    for (size_t n = 0, next = 0; n < lens.size(); ++n) {
      for (int64_t i = 0; i * B < lens[n]; ++i) table[n * batch_.max_pages + i] = order[next++];
    }

    const int64_t set_bytes = 2 * (T * (2 * g_.heads() * g_.head_dim + g_.groups * g_.index_dim) +
                                   num_pages * B * (2 * g_.groups * g_.head_dim + g_.index_dim));
    const auto num_sets = static_cast<int>(
        std::clamp(std::ceil(kColdBytes / static_cast<double>(set_bytes)), 1.0, double{kMaxSets}));
    const IndexSelectPlan index_plan = index_select_plan(g_, batch_, {}, kGpu);
    const AttendPlan plan = attend_plan(g_, batch_, {}, kGpu),
                     full_plan = attend_plan(g_, batch_, {.support = AttendSupport::full()}, kGpu);
    const int64_t workspace =
        std::max({index_plan.workspace_bytes, plan.workspace_bytes, full_plan.workspace_bytes});
    const int64_t small = 4 * (T * g_.groups * g_.topk +
                               static_cast<int64_t>(cu.size() + lens.size() + table.size()));
    arena_ = Arena(
        "bench",
        num_sets * (set_bytes + 8 * Arena::kAlignment) + workspace + small + 16 * Arena::kAlignment,
        kGpu);
    batch_.cu_q = upload(cu), batch_.seq_lens = upload(lens), batch_.page_table = upload(table);
    ids_ = arena_.alloc("ids", DType::kI32, {g_.groups, T, g_.topk});
    workspace_ = arena_.alloc_bytes("workspace", workspace);
    for (int i = 0; i < num_sets; ++i) {
      InputSet set;
      set.q = arena_.alloc("q", DType::kBF16, {T, g_.heads(), g_.head_dim});
      set.o = arena_.alloc("o", DType::kBF16, set.q.shape());
      set.k = arena_.alloc("k", DType::kBF16, {num_pages, g_.groups, B, g_.head_dim});
      set.v = arena_.alloc("v", DType::kBF16, set.k.shape());
      set.qi = arena_.alloc("qi", DType::kBF16, {T, g_.groups, g_.index_dim});
      set.x = arena_.alloc("x", DType::kBF16, {num_pages, B, g_.index_dim});
      for (const Tensor& t : {set.q, set.k, set.v, set.x}) normals.fill(t);
      normals.fill_correlated(set.qi, rho);
      sets_.push_back(set);
    }
    synchronize({}, kGpu);
  }

  void index(int set, Stream stream) {
    const IndexSelectPlan plan = index_select_plan(g_, batch_, {}, kGpu);
    index_select(plan, batch_, sets_[set].qi, sets_[set].x, ids_, {}, workspace_, stream);
  }
  void attend(int set, bool full, Stream stream) {
    const AttendSupport support = full ? AttendSupport::full() : AttendSupport::blocks();
    const AttendPlan plan = attend_plan(g_, batch_, {.support = support}, kGpu);
    m3::attend(plan, batch_, sets_[set].q, sets_[set].k, sets_[set].v, full ? Tensor() : ids_,
               sets_[set].o, {}, workspace_, stream);
  }

  struct Times {
    double median_ms = 0, p10_ms = 0, p90_ms = 0;
  };
  Times measure(int64_t rounds, const std::function<void(int, Stream)>& call) {
    std::vector<std::unique_ptr<DeviceGraph>> graphs;
    for (int set = 0; set < num_sets(); ++set) {
      graphs.push_back(
          std::make_unique<DeviceGraph>(kGpu, [&](Stream stream) { call(set, stream); }));
    }
    std::vector<double> ms;
    for (int64_t round = -kWarmUps; round < rounds; ++round) {
      const double time = graphs[(round + kWarmUps) % num_sets()]->replay_ms();
      if (round >= 0) ms.push_back(time);
    }
    std::sort(ms.begin(), ms.end());
    const auto at = [&](double share) {
      return ms[static_cast<size_t>(share * static_cast<double>(ms.size() - 1))];
    };
    return {at(0.5), at(0.1), at(0.9)};
  }

  // Multiply-adds x 2 of exact visible pairs.
  double flop(bool full) const {
    double scored = 0, pairs = 0;
    for (const Sequence& s : case_.sequences) {
      for (int64_t p = s.context - s.num_new; p < s.context; ++p) {
        const int64_t own = p / g_.block, blocks = full ? own : std::min<int64_t>(own, g_.topk - 1);
        pairs += static_cast<double>(blocks * g_.block + p % g_.block + 1);
        if (!full && own >= g_.topk) scored += static_cast<double>(own * g_.block);
      }
    }
    return 4.0 * g_.heads() * g_.head_dim * pairs + 2.0 * g_.groups * g_.index_dim * scored;
  }
  int num_sets() const { return static_cast<int>(sets_.size()); }
  std::string path(bool full) const {
    const AttendSupport support = full ? AttendSupport::full() : AttendSupport::blocks();
    const std::string attend = attend_path_name(
        attend_cuda_path(g_, batch_, support, DType::kBF16, DType::kBF16, DType::kBF16));
    if (full) return attend;
    return std::string(index_select_path_name(
               index_select_cuda_path(g_, batch_, {}, DType::kBF16, DType::kBF16))) +
           "+" + attend;
  }

 private:
  const int32_t* upload(const std::vector<int32_t>& values) {
    const Tensor tensor =
        arena_.alloc("tables", DType::kI32, {static_cast<int64_t>(values.size())});
    copy(Tensor(const_cast<int32_t*>(values.data()), DType::kI32, tensor.shape()), tensor);
    synchronize({}, kGpu);
    return static_cast<const int32_t*>(tensor.data());
  }

  const Case& case_;
  MsaGeometry g_;
  MsaBatch batch_;
  Arena arena_;
  std::vector<InputSet> sets_;
  Tensor ids_;
  void* workspace_ = nullptr;
};

std::vector<Case> make_cases(const MsaCudaFlags& flags) {
  std::vector<Case> cases;
  if (flags.workload.empty()) {
    for (const int64_t context : flags.contexts) {
      const int64_t num_new = flags.num_new == 0 ? context : flags.num_new;
      if (context < num_new) throw UsageError{"--context must not be smaller than --new"};
      cases.push_back({fmt::format("{}+{}", num_new, context - num_new), {{num_new, context}}});
    }
    return cases;
  }
  const ordered_json document = ordered_json::parse(read_file(flags.workload));
  M3_CHECK(document.value("kind", "") == "prefill", "{}: kind is '{}', want 'prefill'",
           flags.workload, document.value("kind", ""));
  for (const auto& entry : document.at("entries")) {
    Case c{entry.at("id"), {}, entry.at("weight")};
    for (size_t i = 0; i < entry.at("query_lens").size(); ++i) {
      c.sequences.push_back({entry.at("query_lens")[i], entry.at("kv_lens")[i]});
    }
    cases.push_back(c);
  }
  return cases;
}

ordered_json times_json(const Workload::Times& t) {
  return {{"median", t.median_ms}, {"p10", t.p10_ms}, {"p90", t.p90_ms}};
}

}  // namespace

int bench_msa_cuda(const MsaCudaFlags& flags, const Args& args) {
  if (num_cuda_devices() == 0)
    M3_FAIL("bench msa --device cuda: no GPU: {}", cuda_unavailable_reason());
  for (const std::string& kind : flags.kinds) {
    if (kind != "msa" && kind != "full")
      throw UsageError{"--attention: on a GPU msa and full are measured, not '" + kind + "'"};
  }
  fmt::print("{}\n", cuda_device_description(0));
  NormalTable normals;
  ordered_json results = ordered_json::array();
  double weighted_ms = 0, weights = 0;
  for (const Case& c : make_cases(flags)) {
    std::optional<Workload> w(std::in_place, c, flags.rho, normals);
    double msa_ms = 0;
    for (const std::string& kind : flags.kinds) {
      const bool full = kind == "full";
      ordered_json result = {{"case", c.id},
                             {"attention", kind},
                             {"weight", c.weight},
                             {"path", w->path(full)},
                             {"sets", w->num_sets()}};
      Workload::Times index, attend;
      if (!full) {
        index = w->measure(flags.rounds, [&](int set, Stream s) { w->index(set, s); });
        result["index_ms"] = times_json(index);
      }
      attend = w->measure(flags.rounds, [&](int set, Stream s) { w->attend(set, full, s); });
      result["attend_ms"] = times_json(attend);
      const Workload::Times whole =
          full ? attend : w->measure(flags.rounds, [&](int set, Stream s) {
            w->index(set, s);
            w->attend(set, false, s);
          });
      result["whole_ms"] = times_json(whole);
      result["tflops"] = w->flop(full) / whole.median_ms / 1e9;
      if (!full)
        msa_ms = whole.median_ms, weighted_ms += c.weight * whole.median_ms, weights += c.weight;
      fmt::print(
          "{:<16} {:<5} {:9.4f} ms (index {:.4f}, attend {:.4f}; p10 {:.4f}, p90 {:.4f})  {:6.1f} "
          "TFLOP/s  {}{}\n",
          c.id, kind, whole.median_ms, index.median_ms, attend.median_ms, whole.p10_ms,
          whole.p90_ms, double{result["tflops"]}, w->path(full),
          full && msa_ms > 0 ? fmt::format(", {:.2f} x msa", whole.median_ms / msa_ms) : "");
      std::fflush(stdout);
      results.push_back(result);
    }
  }
  if (weights > 0) fmt::print("mean over the weights: {:.4f} ms per call\n", weighted_ms / weights);
  if (!flags.json.empty()) {
    std::string line = "m3 bench msa";
    for (const std::string& word : args) line += " " + word;
    ordered_json document = {{"command", line},
                             {"version", M3_VERSION},
                             {"device", cuda_device_description(0)},
                             {"settings", {{"rho", flags.rho}, {"rounds", flags.rounds}}}};
    if (weights > 0) document["weighted_mean_ms"] = weighted_ms / weights;
    document["results"] = results;
    write_file_atomic(flags.json, document.dump(1) + "\n");
  }
  return 0;
}

}  // namespace m3::cli
