// GPU paths of attend against the fp64 reference and the CPU's fp32 path, which has its own tests
// against that reference. Names T01.. refer to msa.md §15, tolerances to §14.
#include <gtest/gtest.h>

#include <set>

#include "ops/attend/attend.h"
#include "ops/attend/attend_cuda.h"
#include "ops/common/msa_cuda_test_data.h"
#include "ops/index_select/index_select.h"

namespace m3 {
namespace {

using namespace msa_test;

struct Output {
  std::vector<float> o, lse;
  bool operator==(const Output& other) const {  // bits, so that NaN equals itself
    return o.size() == other.o.size() && std::memcmp(o.data(), other.o.data(), o.size() * 4) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0;
  }
};

std::vector<float> widen(const DeviceTensor& tensor) {
  if (tensor.tensor().dtype() == DType::kF32) return tensor.download<float>();
  std::vector<float> values;
  for (bf16 x : tensor.download<bf16>()) values.push_back(static_cast<float>(x));
  return values;
}

Output attend_gpu(const Data& d, const DeviceData& gpu, KvLayout layout, AttendPath path,
                  const AttendSupport& support, const DeviceTensor& lists,
                  DType out_dtype = DType::kBF16) {
  const bool paged = layout == KvLayout::kPaged;
  const MsaBatch& batch = paged ? gpu.paged : gpu.packed;
  const DeviceTensor &k = paged ? gpu.k_pages : gpu.k, &v = paged ? gpu.v_pages : gpu.v;
  const DeviceTensor o(out_dtype, {d.T(), d.g.heads(), d.g.head_dim}),
      lse(DType::kF32, {d.T(), d.g.heads()});
  const DeviceTensor workspace(DType::kU8, {attend_cuda_workspace_bytes(d.g, batch, support)});
  for (const DeviceTensor* t : {&o, &lse, &workspace}) t->poison();
  attend_cuda({.geometry = d.g,
               .batch = batch,
               .support = support,
               .query_dtype = gpu.q.tensor().dtype(),
               .kv_dtype = k.tensor().dtype(),
               .out_dtype = out_dtype,
               .q_THD = gpu.q.tensor().data(),
               .k = k.tensor().data(),
               .v = v.tensor().data(),
               .num_pages = k.tensor().dim(0),
               .lists = lists.tensor().defined() ? lists.ptr<int32_t>() : nullptr,
               .o_THD = o.tensor().data(),
               .lse_TH = lse.ptr<float>(),
               .workspace = workspace.tensor().data()},
              path, {});
  return {widen(o), lse.download<float>()};
}

Output attend_host(const Data& d, const AttendSupport& support, const Tensor& lists,
                   bool reference) {
  Output out{std::vector<float>(d.T() * d.g.heads() * d.g.head_dim),
             std::vector<float>(d.T() * d.g.heads())};
  const Tensor o(out.o.data(), DType::kF32, {d.T(), d.g.heads(), d.g.head_dim});
  const Tensor lse(out.lse.data(), DType::kF32, {d.T(), d.g.heads()});
  if (reference) {
    attend_ref(d.g, d.packed(), support, d.q.tensor(), d.k.tensor(), d.v.tensor(), lists, o, lse);
  } else {
    const AttendPlan plan =
        attend_plan(d.g, d.packed(), {.support = support, .compute = MsaCompute::kF32});
    const Workspace workspace(plan.workspace_bytes);
    attend(plan, d.packed(), d.q.tensor(), d.k.tensor(), d.v.tensor(), lists, o, lse,
           workspace.get());
  }
  return out;
}

Buffer select_ids(const Data& d) {
  Buffer ids(DType::kI32, {d.g.groups, d.T(), d.g.topk});
  const IndexSelectPlan plan = index_select_plan(d.g, d.packed(), {});
  const Workspace workspace(plan.workspace_bytes);
  index_select(plan, d.packed(), d.qi.tensor(), d.ki.tensor(), ids.tensor(), {}, workspace.get());
  return ids;
}

struct Tolerance {
  double mean, max, lse_max;
};
constexpr Tolerance kFp32 = {2e-6, 2e-5, 1e-4}, kBf16 = {4e-3, 8e-3, 5e-4};

// Row errors of msa.md §14: |x - ref| / max(|ref|, 0.1 RMS of the row norms).
void expect_close(const Data& d, const Output& got, const Output& want,
                  const Tolerance& tolerance) {
  const int D = d.g.head_dim;
  const int64_t rows = d.T() * d.g.heads();
  double mean_square = 0;
  for (float x : want.o) mean_square += double{x} * x / std::max<int64_t>(rows, 1);
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    double error = 0, norm = 0;
    for (int c = 0; c < D; ++c) {
      error += std::pow(double{got.o[row * D + c]} - want.o[row * D + c], 2);
      norm += std::pow(want.o[row * D + c], 2);
    }
    const double floor = std::max(std::sqrt(norm), 0.1 * std::sqrt(mean_square));
    const double e = floor == 0 ? std::sqrt(error) : std::sqrt(error) / floor;
    ASSERT_LE(e, tolerance.max) << "row " << row / d.g.heads() << " head " << row % d.g.heads()
                                << " of " << d.T();
    sum += e / rows;
    const float a = got.lse[row], b = want.lse[row];
    if (std::isinf(b)) {
      ASSERT_EQ(a, b) << "LSE of row " << row / d.g.heads();
    } else {
      ASSERT_NEAR(a, b, tolerance.lse_max + std::abs(b) * 0x1p-21)
          << "LSE of row " << row / d.g.heads();
    }
  }
  EXPECT_LE(sum, tolerance.mean);
}

MsaGeometry fast(int groups, int topk) {
  return {.groups = groups,
          .heads_per_group = 16,
          .head_dim = 128,
          .index_dim = 16,
          .block = 128,
          .topk = topk};
}

std::vector<Lengths> random_lengths(Philox& rng) {
  const int32_t borders[] = {1, 127, 128, 129, 255, 1000, 2047, 2048, 2049, 3000};
  std::vector<Lengths> lengths;
  const int num = 1 + static_cast<int>(rng.below(4));
  for (int n = 0; n < num; ++n) {
    const int32_t k =
        rng.below(2) ? borders[rng.below(10)] : 1 + static_cast<int32_t>(rng.below(4000));
    lengths.push_back(
        {std::min<int32_t>(k, 1 + static_cast<int32_t>(rng.below(rng.below(4) == 0 ? 140 : 20))),
         k});
  }
  if (rng.below(5) == 0) lengths.push_back({3, 0});  // an unused slot
  if (rng.below(5) == 0) lengths.push_back({0, 300});
  return lengths;
}

const AttendPath kBlockPaths[] = {AttendPath::kTile, AttendPath::kHybrid, AttendPath::kRows};
const AttendPath kShortPaths[] = {AttendPath::kTile, AttendPath::kHybrid, AttendPath::kRows,
                                  AttendPath::kSplit};

TEST(AttendCuda, hopper_paths_equal_cpu_over_generated_cases) {
  M3_SKIP_WITHOUT_GPU();
  for (int i = 0; i < 200; ++i) {
    Philox rng(500 + i);
    const int topks[] = {4, 16}, groups[] = {1, 2, 4};
    const MsaGeometry g = fast(groups[rng.below(3)], topks[rng.below(2)]);
    const Data d = make_data(g, random_lengths(rng), DType::kBF16, 500 + i, i % 3 == 0 ? 4.0 : 1.0);
    SCOPED_TRACE(fmt::format("seed {} groups {} topk {} sequences {}", d.seed, g.groups, g.topk,
                             d.num_seqs()));
    const DeviceData gpu(d);
    const Buffer ids = select_ids(d);
    const DeviceTensor lists(ids.tensor());
    const Output want = attend_host(d, AttendSupport::blocks(), ids.tensor(), false);
    for (AttendPath path : kShortPaths) {
      SCOPED_TRACE(attend_path_name(path));
      const Output got =
          attend_gpu(d, gpu, KvLayout::kPacked, path, AttendSupport::blocks(), lists);
      expect_close(d, got, want, kBf16);
      EXPECT_TRUE(got ==
                  attend_gpu(d, gpu, KvLayout::kPacked, path, AttendSupport::blocks(), lists))
          << "second run";
      EXPECT_TRUE(got == attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::blocks(), lists))
          << "paged";
    }
    if (i % 2 == 0) {
      const Output all = attend_host(d, AttendSupport::full(), {}, false);
      for (AttendPath path : {AttendPath::kTile, AttendPath::kSplit}) {
        const Output got = attend_gpu(d, gpu, KvLayout::kPacked, path, AttendSupport::full(), {});
        expect_close(d, got, all, kBf16);
        EXPECT_TRUE(got == attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::full(), {}))
            << attend_path_name(path) << " paged";
      }
    }
    if (testing::Test::HasFailure()) return;
  }
}

// Many tiles per CTA, all ring phases, several sequences in one launch; the oracle is the general
// GPU path.
TEST(AttendCuda, whole_prefill_equals_general_path) {
  M3_SKIP_WITHOUT_GPU();
  const Data d = make_data(fast(4, 16), {{3000, 3000}, {333, 5000}, {130, 2049}}, DType::kBF16, 11);
  const DeviceData gpu(d);
  const DeviceTensor lists(select_ids(d).tensor());
  const Output want = attend_gpu(d, gpu, KvLayout::kPacked, AttendPath::kGeneral,
                                 AttendSupport::blocks(), lists, DType::kF32);
  for (AttendPath path : kBlockPaths) {
    expect_close(d, attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::blocks(), lists),
                 want, kBf16);
  }
  const Output all = attend_gpu(d, gpu, KvLayout::kPacked, AttendPath::kGeneral,
                                AttendSupport::full(), {}, DType::kF32);
  expect_close(d,
               attend_gpu(d, gpu, KvLayout::kPaged, AttendPath::kTile, AttendSupport::full(), {}),
               all, kBf16);
}

// Partial results of more queries than a chunk holds: the workspace is used twice.
TEST(AttendCuda, several_chunks_equal_general_path) {
  M3_SKIP_WITHOUT_GPU();
  const Data d = make_data(fast(1, 16), {{12500, 12500}, {40, 9000}}, DType::kBF16, 14);
  const DeviceData gpu(d);
  const DeviceTensor lists(select_ids(d).tensor());
  const Output want = attend_gpu(d, gpu, KvLayout::kPacked, AttendPath::kGeneral,
                                 AttendSupport::blocks(), lists, DType::kF32);
  for (AttendPath path : {AttendPath::kHybrid, AttendPath::kRows}) {
    const Output got = attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::blocks(), lists);
    expect_close(d, got, want, kBf16);
    EXPECT_TRUE(got == attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::blocks(), lists))
        << "second run";
  }
}

// A few hundred queries on a long cache, whose tiles are cut over CTAs at every place there is: as
// many tiles as SMs, fewer, and more; pieces of one block, and several sequences.
TEST(AttendCuda, split_tiles_equal_general_path) {
  M3_SKIP_WITHOUT_GPU();
  const std::vector<Lengths> cases[] = {{{300, 20000}},
                                        {{17, 9000}},
                                        {{41, 30000}},
                                        {{264, 12000}},
                                        {{90, 5000}, {1, 12000}, {33, 129}, {200, 2500}},
                                        {{1000, 9000}},
                                        {{8, 8}}};
  uint64_t seed = 60;
  for (const std::vector<Lengths>& lengths : cases) {
    for (const int groups : {1, 4}) {
      const Data d = make_data(fast(groups, 16), lengths, DType::kBF16, seed++);
      SCOPED_TRACE(fmt::format("seed {} groups {}", d.seed, groups));
      const DeviceData gpu(d);
      const DeviceTensor lists(select_ids(d).tensor());
      for (const AttendSupport& support : {AttendSupport::blocks(), AttendSupport::full()}) {
        const DeviceTensor none;
        const DeviceTensor& ids = support.kind == AttendSupport::Kind::kBlocks ? lists : none;
        const Output want = attend_gpu(d, gpu, KvLayout::kPacked, AttendPath::kGeneral, support,
                                       ids, DType::kF32);
        const Output got =
            attend_gpu(d, gpu, KvLayout::kPaged, AttendPath::kSplit, support, ids);
        expect_close(d, got, want, kBf16);
        for (int run = 0; run < 3; ++run) {
          EXPECT_TRUE(got ==
                      attend_gpu(d, gpu, KvLayout::kPaged, AttendPath::kSplit, support, ids))
              << "run " << run;
        }
      }
    }
  }
}

// T21, T23: NaN in keys and values that a row does not see changes nothing, also inside its own
// block and in blocks that only its neighbours selected.
TEST(AttendCuda, unseen_nan_has_no_effect) {
  M3_SKIP_WITHOUT_GPU();
  const MsaGeometry g = fast(2, 4);
  Data d = make_data(g, {{64, 1500}}, DType::kBF16, 31);
  const Buffer ids = select_ids(d);
  const DeviceTensor lists(ids.tensor());
  // Block 3 and the last 20 tokens of the sequence become NaN; rows that see them are left out.
  const auto spoiled = [&](int64_t j) { return j / g.block == 3 || j >= 1480; };
  std::vector<bool> sees(g.groups * d.T());
  for (int r = 0; r < g.groups; ++r) {
    for (int64_t t = 0; t < d.T(); ++t) {
      const int32_t* row = ids.tensor().ptr<int32_t>() + (r * d.T() + t) * g.topk;
      sees[r * d.T() + t] = std::count(row, row + g.topk, 3) > 0 || 1500 - 64 + t >= 1480;
    }
  }
  ASSERT_GT(std::count(sees.begin(), sees.end(), false), 10);
  ASSERT_GT(std::count(sees.begin(), sees.end(), true), 10);
  const Output clean = attend_host(d, AttendSupport::blocks(), ids.tensor(), false);
  for (int64_t j = 0; j < 1500; ++j) {
    if (!spoiled(j)) continue;
    for (int64_t i = 0; i < g.groups * g.head_dim; ++i) {
      d.k.set(j * g.groups * g.head_dim + i, kNan);
      d.v.set(j * g.groups * g.head_dim + i, i % 2 == 0 ? kNan : kInf);
    }
  }
  d.fill_pages();
  const DeviceData gpu(d);
  for (AttendPath path : kShortPaths) {
    const Output got = attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::blocks(), lists);
    for (int64_t t = 0; t < d.T(); ++t) {
      for (int h = 0; h < g.heads(); ++h) {
        if (sees[h / g.heads_per_group * d.T() + t]) continue;
        for (int c = 0; c < g.head_dim; ++c) {
          const int64_t at = (t * g.heads() + h) * g.head_dim + c;
          ASSERT_NEAR(got.o[at], clean.o[at], 0.02)
              << attend_path_name(path) << " row " << t << " head " << h;
        }
        ASSERT_NEAR(got.lse[t * g.heads() + h], clean.lse[t * g.heads() + h], 1e-3);
      }
    }
  }
}

TEST(AttendCuda, general_path_equals_reference_over_geometries_types_and_supports) {
  M3_SKIP_WITHOUT_GPU();
  const MsaGeometry geometries[] = {
      {.groups = 2, .heads_per_group = 2, .head_dim = 32, .index_dim = 16, .block = 16, .topk = 4},
      {.groups = 3, .heads_per_group = 3, .head_dim = 48, .index_dim = 16, .block = 48, .topk = 4},
      {.groups = 1,
       .heads_per_group = 8,
       .head_dim = 256,
       .index_dim = 16,
       .block = 32,
       .topk = 5,
       .local = 2,
       .init = 1},
      {.groups = 2,
       .heads_per_group = 4,
       .head_dim = 64,
       .index_dim = 16,
       .block = 64,
       .topk = 2,
       .scale = 0.3},
      fast(2, 4),
      // Geometries of M3's family that the fast paths do not have: G 1, 2, 4, 8; D 64; B 64; K 64.
      {.groups = 2,
       .heads_per_group = 1,
       .head_dim = 128,
       .index_dim = 16,
       .block = 128,
       .topk = 4},
      {.groups = 2, .heads_per_group = 2, .head_dim = 128, .index_dim = 16, .block = 64, .topk = 4},
      {.groups = 1,
       .heads_per_group = 4,
       .head_dim = 128,
       .index_dim = 16,
       .block = 128,
       .topk = 8},
      {.groups = 1, .heads_per_group = 8, .head_dim = 64, .index_dim = 16, .block = 64, .topk = 64},
  };
  uint64_t seed = 100;
  for (const MsaGeometry& g : geometries) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const Data d =
          make_data(g, {{40, 300}, {1, 301}, {5, g.block + 2}, {0, 7}, {3, 0}, {g.block, g.block}},
                    dtype, seed++);
      const DeviceData gpu(d);
      const Buffer ids = select_ids(d);
      const AttendSupport supports[] = {AttendSupport::blocks(), AttendSupport::full(),
                                        AttendSupport::sliding(37, 5)};
      for (const AttendSupport& support : supports) {
        SCOPED_TRACE(fmt::format("seed {} support {}", d.seed, static_cast<int>(support.kind)));
        const bool blocks = support.kind == AttendSupport::Kind::kBlocks;
        const DeviceTensor lists = blocks ? DeviceTensor(ids.tensor()) : DeviceTensor();
        const Output want = attend_host(d, support, blocks ? ids.tensor() : Tensor(), true);
        for (KvLayout layout : {KvLayout::kPacked, KvLayout::kPaged}) {
          expect_close(
              d, attend_gpu(d, gpu, layout, AttendPath::kGeneral, support, lists, DType::kF32),
              want, kFp32);
        }
      }
    }
  }
}

// Which path a call takes: by types, geometry and the host's bounds of the lengths.
TEST(AttendCuda, path_follows_types_geometry_and_sizes) {
  const auto path = [](const MsaGeometry& g, int64_t num_queries, int64_t max_q_len,
                       const AttendSupport& support, DType dtype = DType::kBF16,
                       KvLayout layout = KvLayout::kPaged) {
    const MsaBatch batch{.layout = layout,
                         .num_seqs = 2,
                         .num_queries = num_queries,
                         .max_q_len = max_q_len,
                         .max_k_len = 131072};
    return attend_cuda_path(g, batch, support, dtype, dtype, dtype);
  };
  const MsaGeometry m3 = fast(4, 16);
  const AttendSupport blocks = AttendSupport::blocks(), full = AttendSupport::full();
  EXPECT_EQ(path(m3, 2, 1, blocks), AttendPath::kDecode);
  EXPECT_EQ(path(m3, 32, 16, blocks), AttendPath::kDecode);
  EXPECT_EQ(path(m3, 2, 1, full), AttendPath::kDecode);
  EXPECT_EQ(path(m3, 2, 1, blocks, DType::kBF16, KvLayout::kPacked), AttendPath::kSplit)
      << "decode reads pages";
  EXPECT_EQ(path(m3, 34, 17, blocks), AttendPath::kSplit);
  EXPECT_EQ(path(m3, 338, 338, blocks), AttendPath::kSplit);
  EXPECT_EQ(path(m3, 400, 400, blocks), AttendPath::kHybrid) << "more than one and a half waves";
  EXPECT_EQ(path(m3, 1000, 1000, full), AttendPath::kSplit);
  EXPECT_EQ(path(m3, 1100, 1100, full), AttendPath::kTile) << "more than four waves";
  EXPECT_EQ(path(m3, 100, 40000, blocks), AttendPath::kTile) << "may be no short chunk";
  EXPECT_EQ(path(m3, 131072, 131072, blocks), AttendPath::kHybrid);
  EXPECT_EQ(path(m3, 131072, 131072, full), AttendPath::kTile);
  EXPECT_EQ(path(m3, 131072, 131072, AttendSupport::sliding(512, 0)), AttendPath::kGeneral);
  EXPECT_EQ(path(m3, 131072, 131072, blocks, DType::kF32), AttendPath::kGeneral);
  EXPECT_EQ(path(fast(4, 8), 131072, 131072, blocks), AttendPath::kGeneral);
  EXPECT_EQ(path(fast(1, 4), 131072, 131072, blocks), AttendPath::kHybrid);
  for (const int heads : {1, 2, 4, 8}) {
    MsaGeometry g = m3;
    g.heads_per_group = heads;
    EXPECT_EQ(path(g, 131072, 131072, blocks), AttendPath::kGeneral) << heads;
  }
  MsaGeometry narrow = m3, small = m3;
  narrow.head_dim = 64, small.block = 64;
  EXPECT_EQ(path(narrow, 131072, 131072, blocks), AttendPath::kGeneral);
  EXPECT_EQ(path(small, 131072, 131072, blocks), AttendPath::kGeneral);
}

TEST(AttendCuda, plan_tells_the_path) {
  const MsaBatch batch{.layout = KvLayout::kPaged,
                       .num_seqs = 1,
                       .num_queries = 300,
                       .max_q_len = 300,
                       .max_k_len = 131372};
  const AttendPlan plan = attend_plan(fast(4, 16), batch, {}, kGpu);
  EXPECT_STREQ(attend_path(plan, batch, DType::kBF16, DType::kBF16, DType::kBF16), "split");
  EXPECT_STREQ(attend_path(plan, batch, DType::kF32, DType::kF32, DType::kF32), "general");
  const Data d = make_data(fast(1, 4), {{2, 5}}, DType::kF32, 1);
  EXPECT_STREQ(attend_path(attend_plan(d.g, d.packed(), {}), d.packed(), DType::kF32, DType::kF32,
                           DType::kF32),
               "cpu");
}

// Small enough for compute-sanitizer (scripts/gpu-check.sh): pairs, shared blocks, empty rows, a
// partial block.
TEST(AttendCuda, small_case_of_every_path) {
  M3_SKIP_WITHOUT_GPU();
  const Data d = make_data(fast(2, 4), {{70, 1500}, {20, 700}, {2, 0}}, DType::kBF16, 13);
  const DeviceData gpu(d);
  const Buffer ids = select_ids(d);
  const DeviceTensor lists(ids.tensor());
  const Output want = attend_host(d, AttendSupport::blocks(), ids.tensor(), false);
  for (AttendPath path : {AttendPath::kGeneral, AttendPath::kTile, AttendPath::kHybrid,
                          AttendPath::kRows, AttendPath::kSplit}) {
    SCOPED_TRACE(attend_path_name(path));
    expect_close(d, attend_gpu(d, gpu, KvLayout::kPaged, path, AttendSupport::blocks(), lists),
                 want, kBf16);
  }
  const Output all = attend_host(d, AttendSupport::full(), {}, false);
  expect_close(d,
               attend_gpu(d, gpu, KvLayout::kPaged, AttendPath::kTile, AttendSupport::full(), {}),
               all, kBf16);
}

// T01: up to K blocks the operator equals dense attention.
TEST(AttendCuda, short_sequences_equal_dense) {
  M3_SKIP_WITHOUT_GPU();
  const Data d = make_data(fast(4, 16), {{300, 2048}, {129, 129}}, DType::kBF16, 12);
  const DeviceData gpu(d);
  const DeviceTensor lists(select_ids(d).tensor());
  const Output sparse =
      attend_gpu(d, gpu, KvLayout::kPacked, AttendPath::kTile, AttendSupport::blocks(), lists);
  const Output dense =
      attend_gpu(d, gpu, KvLayout::kPacked, AttendPath::kTile, AttendSupport::full(), {});
  EXPECT_TRUE(sparse == dense) << "the same blocks in the same order: the same bits";
}

}  // namespace
}  // namespace m3
