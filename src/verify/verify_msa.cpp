// msa/NAME.json: the MSA operators against the goldens of the fp64 oracle. Every case runs twice, over
// packed keys and over the same keys laid out in shuffled pages whose unused bytes are NaN.
//
// Selection is compared by its own ids, attention over the golden's ids (msa.md §14: the reference is
// taken with the same ids). Inputs keep the case's type; with --dtype bf16 cases of that type allow bf16
// arithmetic and write O in bf16, and the bf16 lines of the tolerances hold.
#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/rng.h"
#include "ops/attend/attend.h"
#include "ops/dsa_select/dsa_select.h"
#include "ops/index_select/index_select.h"
#include "verify/msa_case.h"
#include "verify/msa_training.h"
#include "verify/suites.h"

namespace m3::verify {
namespace {

// Cases whose arithmetic is exact or whose selection is forced: ids equal in every row (README).
constexpr const char* kExactCases[] = {"ties", "ties_zero", "nan_inf", "huge_scores", "block_window", "planted"};

// The keys of a case on the device in one of the two layouts, and the batch that describes them there.
struct Layout {
  const char* name;
  MsaBatch batch;
  Tensor k, v, index_keys;  // index keys of msa or dsa, if the case has them
};

const char* index_key_name(const MsaCase& c) { return c.mode == "dsa" ? "kx" : "ki"; }

const int32_t* upload_ints(MsaMemory& memory, const std::vector<int32_t>& values) {
  return static_cast<const int32_t*>(memory.upload(values, {static_cast<int64_t>(values.size())}).data());
}

MsaBatch make_batch(const MsaCase& c, KvLayout layout, MsaMemory& memory) {
  MsaBatch batch{.layout = layout, .num_seqs = c.num_seqs(), .num_queries = c.num_queries()};
  batch.cu_q = upload_ints(memory, c.cu_q);
  for (int n = 0; n < c.num_seqs(); ++n) {
    batch.max_q_len = std::max<int64_t>(batch.max_q_len, c.cu_q[n + 1] - c.cu_q[n]);
    batch.max_k_len = std::max<int64_t>(batch.max_k_len, c.cu_k[n + 1] - c.cu_k[n]);
  }
  return batch;
}

Layout packed_layout(const MsaCase& c, MsaMemory& memory) {
  const MsaGeometry& g = c.geometry;
  const int64_t S = c.num_keys();
  Layout l{.name = "packed", .batch = make_batch(c, KvLayout::kPacked, memory)};
  l.batch.cu_k = upload_ints(memory, c.cu_k);
  l.k = memory.upload(c.inputs.at("k"), c.dtype, {S, g.groups, g.head_dim});
  l.v = memory.upload(c.inputs.at("v"), c.dtype, {S, g.groups, g.head_dim});
  l.index_keys = memory.upload(c.inputs.at(index_key_name(c)), c.dtype, {S, g.index_dim});
  return l;
}

// The pages of all sequences in a shuffled order, with pages that belong to nobody between them.
struct PageTable {
  std::vector<int32_t> entries, seq_lens;
  int64_t max_pages = 1, num_pages = 2;

  explicit PageTable(const MsaCase& c) {
    const int B = c.geometry.block;
    for (int n = 0; n < c.num_seqs(); ++n) {
      seq_lens.push_back(c.cu_k[n + 1] - c.cu_k[n]);
      const int64_t used = (seq_lens[n] + B - 1) / B;
      max_pages = std::max(max_pages, used + 1);
      num_pages += used;
    }
    std::vector<int32_t> order(num_pages);
    std::iota(order.begin(), order.end(), 0);
    Philox rng(17);
    for (int64_t i = num_pages - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);
    entries.assign(c.num_seqs() * max_pages, -1);  // what lies behind a sequence's pages must not be read
    auto next = order.begin();
    for (int n = 0; n < c.num_seqs(); ++n) {
      for (int64_t i = 0; i * B < seq_lens[n]; ++i) entries[n * max_pages + i] = *next++;
    }
  }

  // Packed rows of `heads` x `dim` as [num_pages, heads, block, dim], NaN elsewhere.
  std::vector<float> fill(const MsaCase& c, const std::vector<float>& rows, int heads, int dim) const {
    const int B = c.geometry.block;
    std::vector<float> pages(num_pages * heads * B * dim, std::numeric_limits<float>::quiet_NaN());
    for (int n = 0; n < c.num_seqs(); ++n) {
      for (int64_t j = 0; j < seq_lens[n]; ++j) {
        const int64_t page = entries[n * max_pages + j / B];
        for (int h = 0; h < heads; ++h) {
          std::copy_n(rows.begin() + ((c.cu_k[n] + j) * heads + h) * dim, dim,
                      pages.begin() + ((page * heads + h) * B + j % B) * dim);
        }
      }
    }
    return pages;
  }
};

Layout paged_layout(const MsaCase& c, MsaMemory& memory) {
  const MsaGeometry& g = c.geometry;
  const PageTable table(c);
  Layout l{.name = "paged", .batch = make_batch(c, KvLayout::kPaged, memory)};
  l.batch.seq_lens = upload_ints(memory, table.seq_lens);
  l.batch.page_table = upload_ints(memory, table.entries);
  l.batch.max_pages = table.max_pages;
  const Shape kv_shape{table.num_pages, g.groups, g.block, g.head_dim};
  l.k = memory.upload(table.fill(c, c.inputs.at("k"), g.groups, g.head_dim), c.dtype, kv_shape);
  l.v = memory.upload(table.fill(c, c.inputs.at("v"), g.groups, g.head_dim), c.dtype, kv_shape);
  l.index_keys = memory.upload(table.fill(c, c.inputs.at(index_key_name(c)), 1, g.index_dim), c.dtype,
                               {table.num_pages, g.block, g.index_dim});
  return l;
}

// ------------------------------------------------------------------------------------------------ selection

double norm_of(const float* row, int dim) {
  double square = 0;
  for (int c = 0; c < dim; ++c) square += double{row[c]} * row[c];
  return std::sqrt(square);
}

// One row of one group: what the near-tie rule of msa.md §14 needs.
struct RowScores {
  std::vector<double> block_max;  // of the visible blocks, fp64
  double band = 0;                // tau = 3e-5 |qi| max |ki|
};

RowScores row_scores(const MsaCase& c, int n, int64_t i, int r) {
  const int X = c.geometry.index_dim, B = c.geometry.block;
  const int64_t t = c.cu_q[n] + i, p = c.cu_k[n + 1] - c.cu_k[n] - (c.cu_q[n + 1] - c.cu_q[n]) + i;
  const float* query = c.inputs.at("qi").data() + (t * c.geometry.groups + r) * X;
  RowScores scores{std::vector<double>(p / B + 1, -std::numeric_limits<double>::infinity())};
  double max_norm = 0;
  for (int64_t j = 0; j <= p; ++j) {
    const float* key = c.inputs.at("ki").data() + (c.cu_k[n] + j) * X;
    double z = 0;
    for (int x = 0; x < X; ++x) z += double{query[x]} * key[x];
    if (!std::isnan(z)) scores.block_max[j / B] = std::max(scores.block_max[j / B], z);
    max_norm = std::max(max_norm, norm_of(key, X));
  }
  scores.band = 3e-5 * norm_of(query, X) * max_norm;
  return scores;
}

// A list that differs from the golden's must differ by near-ties only.
void check_near_tie(const MsaCase& c, const RowScores& scores, float gap, const int32_t* got, const int32_t* want,
                    const std::string& where) {
  const MsaGeometry& g = c.geometry;
  M3_CHECK(gap <= scores.band, "{}: ids differ although the gap {} exceeds the band {}", where, gap, scores.band);
  const int64_t own = static_cast<int64_t>(scores.block_max.size()) - 1;
  const auto has = [&](const int32_t* list, int64_t id) { return std::find(list, list + g.topk, id) != list + g.topk; };
  double last = std::numeric_limits<double>::infinity();  // the golden's last choice by score
  for (int64_t b = g.init; b <= own - g.local; ++b) {
    if (has(want, b)) last = std::min(last, scores.block_max[b]);
  }
  for (int64_t b = 0; b <= own; ++b) {
    const bool forced = b < g.init || b > own - g.local;
    const double m = scores.block_max[b];
    M3_CHECK(forced ? has(got, b) : has(got, b) ? m >= last - scores.band : m <= last + scores.band,
             "{}: block {} of score {} is {} beside a last choice of {}", where, b, m, has(got, b) ? "chosen" : "left out", last);
  }
}

std::string check_selection(const MsaCase& c, const Layout& layout, MsaMemory& memory) {
  const MsaGeometry& g = c.geometry;
  const int64_t T = c.num_queries();
  const bool with_scores = c.expects("sel_scores");
  const Tensor qi = memory.upload(c.inputs.at("qi"), c.dtype, {T, g.groups, g.index_dim});
  const Tensor ids = memory.poisoned(DType::kI32, {g.groups, T, g.topk});
  const Tensor scores = with_scores ? memory.poisoned(DType::kF32, {g.groups, T, g.topk}) : Tensor();
  const IndexSelectPlan plan = index_select_plan(g, layout.batch, {.sel_scores = with_scores}, memory.device());
  index_select(plan, layout.batch, qi, layout.index_keys, ids, scores, memory.workspace(plan.workspace_bytes));

  const std::vector<int32_t> got = memory.download_ints(ids), want = c.expected_ints("ids");
  const std::vector<float> gap = c.expected("gap");
  const std::vector<float> got_scores = with_scores ? memory.download(scores) : std::vector<float>();
  const std::vector<float> want_scores = with_scores ? c.expected("sel_scores") : std::vector<float>();
  const bool exact = std::find(std::begin(kExactCases), std::end(kExactCases), c.name) != std::end(kExactCases);
  int num_near_ties = 0;
  double worst_score = 0;
  for (int n = 0; n < c.num_seqs(); ++n) {
    for (int64_t i = 0; i < c.cu_q[n + 1] - c.cu_q[n]; ++i) {
      for (int r = 0; r < g.groups; ++r) {
        const int64_t row = r * T + c.cu_q[n] + i, at = row * g.topk;
        const bool same = std::equal(got.begin() + at, got.begin() + at + g.topk, want.begin() + at);
        const std::string where = fmt::format("{}, row {} of group {}", layout.name, c.cu_q[n] + i, r);
        M3_CHECK(same || !exact, "{}: ids differ in a case of exact ids", where);
        if (!same) check_near_tie(c, row_scores(c, n, i, r), gap[row], &got[at], &want[at], where);
        num_near_ties += !same;
        for (int s = 0; with_scores && same && s < g.topk; ++s) {
          if (got_scores[at + s] == want_scores[at + s]) continue;
          const double miss = std::abs(double{got_scores[at + s]} - want_scores[at + s]) / row_scores(c, n, i, r).band;
          M3_CHECK(miss <= 1, "{}: sel_scores[{}] is {}, want {}", where, s, got_scores[at + s], want_scores[at + s]);
          worst_score = std::max(worst_score, miss);
        }
      }
    }
  }
  std::string detail = num_near_ties == 0 ? "ids equal" : fmt::format("ids equal but {} near-ties", num_near_ties);
  if (with_scores) detail += fmt::format(", scores {:.2f} of the band", worst_score);
  return detail;
}

// ------------------------------------------------------------------------------------------------ attention

// Selecting single tokens has a CPU path only; on a GPU the lists (logical positions, the same for every
// layout) are made on the host and copied.
Tensor dsa_lists(const MsaCase& c, const Layout& layout, MsaMemory& memory) {
  if (!memory.device().is_cpu()) {
    MsaMemory host{Device{}};
    const Tensor tokens = dsa_lists(c, packed_layout(c, host), host);
    return memory.upload({tokens.ptr<int32_t>(), tokens.ptr<int32_t>() + tokens.numel()}, tokens.shape());
  }
  const int64_t T = c.num_queries(), budget = c.support.budget;
  const DsaGeometry g{.heads = c.dsa_heads, .index_dim = c.geometry.index_dim, .block = c.geometry.block, .budget = budget};
  const Tensor qx = memory.upload(c.inputs.at("qx"), c.dtype, {T, g.heads, g.index_dim});
  const Tensor wx = memory.upload(c.inputs.at("wx"), DType::kF32, {T, g.heads});
  const Tensor tokens = memory.poisoned(DType::kI32, {T, budget});
  const DsaSelectPlan plan = dsa_select_plan(g, layout.batch, memory.device());
  dsa_select(plan, layout.batch, qx, layout.index_keys, wx, tokens, memory.workspace(plan.workspace_bytes));
  return tokens;
}

std::string check_attention(const MsaCase& c, const Layout& layout, MsaMemory& memory, bool bf16_arithmetic) {
  const MsaGeometry& g = c.geometry;
  const int64_t T = c.num_queries();
  Tensor lists;
  if (c.mode == "msa") lists = memory.upload(c.expected_ints("ids"), {g.groups, T, g.topk});
  if (c.mode == "dsa") lists = dsa_lists(c, layout, memory);
  const Tensor q = memory.upload(c.inputs.at("q"), c.dtype, {T, g.heads(), g.head_dim});
  const Tensor o = memory.poisoned(bf16_arithmetic ? DType::kBF16 : DType::kF32, {T, g.heads(), g.head_dim});
  const Tensor lse = memory.poisoned(DType::kF32, {T, g.heads()});
  const AttendPlan plan = attend_plan(
      g, layout.batch, {.support = c.support, .compute = bf16_arithmetic ? MsaCompute::kBF16 : MsaCompute::kF32}, memory.device());
  attend(plan, layout.batch, q, layout.k, layout.v, lists, o, lse, memory.workspace(plan.workspace_bytes));

  const std::vector<float> got = pick_rows(memory.download(o), c.stored_rows(), g.heads() * g.head_dim);
  const RowErrors errors = row_errors(got, c.expected("O"), g.head_dim);
  const double mean_limit = bf16_arithmetic ? 4e-3 : 2e-6, max_limit = bf16_arithmetic ? 8e-3 : 2e-5;
  const double lse_limit = bf16_arithmetic ? 5e-4 : 1e-4;
  const double lse_ratio = worst_ratio(memory.download(lse), c.expected("LSE"), lse_limit, 0x1p-21);
  M3_CHECK(errors.mean <= mean_limit && errors.max <= max_limit, "{}: O is off by {:.2e} mean, {:.2e} max (limits {:.0e}, {:.0e})",
           layout.name, errors.mean, errors.max, mean_limit, max_limit);
  M3_CHECK(lse_ratio <= 1, "{}: LSE is off by {:.2f} times its tolerance", layout.name, lse_ratio);
  return fmt::format("O {:.1e} mean {:.1e} max (limits {:.0e}, {:.0e}), LSE {:.2f} of its tolerance", errors.mean,
                     errors.max, mean_limit, max_limit, lse_ratio);
}

std::string verify_forward(const MsaCase& c, const Options& options) {
  const bool bf16_arithmetic = options.dtype == DType::kBF16 && c.dtype == DType::kBF16;
  std::string detail;
  for (const auto& make_layout : {packed_layout, paged_layout}) {
    MsaMemory memory(options.device);
    const Layout layout = make_layout(c, memory);
    detail += (detail.empty() ? "" : "; ") + std::string(layout.name) + ": ";
    if (c.has_selection) detail += check_selection(c, layout, memory) + ", ";
    detail += check_attention(c, layout, memory, bf16_arithmetic);
    if (c.mode == "dsa" && !memory.device().is_cpu()) detail += " (token lists from the CPU: dsa_select has no GPU path)";
  }
  return detail;
}

}  // namespace

bool verify_msa(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report) {
  if (!document.is_object() || document.value("kind", "") != "msa") return false;
  const std::string name = "msa/" + document.value("name", file.stem().string());
  report.run(name, [&] { return verify_forward(load_msa_case(file, document), report.options()); });
  const auto& run = document.at("run");
  if (!run.value("backward", false) && run.value("kl", "").empty()) return true;
  if (!report.options().device.is_cpu()) {
    report.skip(name + "/training", "attend_backward and index_kl run on the CPU so far");
    return true;
  }
  report.run(name + "/training",
             [&] { return check_msa_training(load_msa_case(file, document), document, report.options()); });
  return true;
}

}  // namespace m3::verify
