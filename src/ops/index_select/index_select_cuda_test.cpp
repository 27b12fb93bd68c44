// GPU paths of index_select against the fp64 reference. Names T01.. refer to msa.md §15.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "ops/common/msa_cuda_test_data.h"
#include "ops/index_select/index_select.h"
#include "ops/index_select/index_select_cuda.h"
#include "ops/index_select/index_select_expect.h"

namespace m3 {
namespace {

using namespace msa_test;

Selection select_ref(const Data& d, const IndexSelectOptions& options = {}) {
  const int64_t count = d.g.groups * d.T() * d.g.topk;
  Selection s{std::vector<int32_t>(count), std::vector<float>(options.sel_scores ? count : 0)};
  const Shape shape{d.g.groups, d.T(), d.g.topk};
  index_select_ref(d.g, d.packed(), options, d.qi.tensor(), d.ki.tensor(),
                   Tensor(s.ids.data(), DType::kI32, shape),
                   options.sel_scores ? Tensor(s.scores.data(), DType::kF32, shape) : Tensor());
  return s;
}

// `path` overrides the choice of the operator.
Selection select_gpu(const Data& d, const DeviceData& gpu, KvLayout layout, IndexSelectPath path,
                     const IndexSelectOptions& options = {}) {
  const MsaBatch& batch = layout == KvLayout::kPaged ? gpu.paged : gpu.packed;
  const DeviceTensor& ki = layout == KvLayout::kPaged ? gpu.x_pages : gpu.ki;
  const Shape shape{d.g.groups, d.T(), d.g.topk};
  const DeviceTensor ids(DType::kI32, shape),
      scores(DType::kF32, options.sel_scores ? shape : Shape{1});
  const DeviceTensor workspace(DType::kU8, {index_select_cuda_workspace_bytes(d.g, batch)});
  for (const DeviceTensor* t : {&ids, &scores, &workspace}) t->poison();
  index_select_cuda({.geometry = d.g,
                     .batch = batch,
                     .options = options,
                     .query_dtype = gpu.qi.tensor().dtype(),
                     .key_dtype = ki.tensor().dtype(),
                     .qi_TRX = gpu.qi.tensor().data(),
                     .ki = ki.tensor().data(),
                     .num_pages = ki.tensor().dim(0),
                     .ids_RTK = ids.ptr<int32_t>(),
                     .sel_scores_RTK = options.sel_scores ? scores.ptr<float>() : nullptr,
                     .workspace = workspace.tensor().data()},
                    path, {});
  return {ids.download<int32_t>(),
          options.sel_scores ? scores.download<float>() : std::vector<float>()};
}

MsaGeometry fast(int groups, int topk) {
  return {.groups = groups,
          .heads_per_group = 1,
          .head_dim = 16,
          .index_dim = 128,
          .block = 128,
          .topk = topk};
}

enum class Content { kNormal, kInteger, kCorrelated, kBad };

void set_content(Data& d, Content content) {
  const int X = d.g.index_dim;
  Philox rng(d.seed, 9);
  if (content == Content::kInteger) {  // exact sums, many ties
    for (int64_t i = 0; i < d.qi.tensor().numel(); ++i)
      d.qi.set(i, static_cast<float>(rng.below(3)) - 1);
    for (int64_t i = 0; i < d.ki.tensor().numel(); ++i)
      d.ki.set(i, static_cast<float>(rng.below(3)) - 1);
  } else if (content == Content::kCorrelated) {  // AR(1), rho = 0.99
    const int64_t row = d.g.groups * X;
    for (int64_t i = row; i < d.qi.tensor().numel(); ++i)
      d.qi.set(i, 0.99f * d.qi.get(i - row) + 0.141f * d.qi.get(i));
  } else if (content == Content::kBad) {
    for (int i = 0; i < 40; ++i) {
      const float values[] = {kNan, kInf, -kInf, 1e15f};
      d.ki.set(rng.below(d.ki.tensor().numel()), values[i % 4]);
      d.qi.set(rng.below(d.qi.tensor().numel()), values[(i + 1) % 4]);
    }
  }
  d.fill_pages();
}

struct Case {
  MsaGeometry geometry;
  std::vector<Lengths> lengths;
  Content content;
  uint64_t seed;
};

std::vector<Case> generated_cases(int count) {
  std::vector<Case> cases;
  const int topks[] = {4, 16}, groups[] = {1, 2, 4};
  const int32_t borders[] = {1, 127, 128, 129, 255, 1000, 2047, 2048, 2049, 3000};
  for (int i = 0; i < count; ++i) {
    Philox rng(1000 + i);
    Case c{fast(groups[rng.below(3)], topks[rng.below(2)]),
           {},
           static_cast<Content>(rng.below(4)),
           static_cast<uint64_t>(1000 + i)};
    const int num = 1 + static_cast<int>(rng.below(4));
    for (int n = 0; n < num; ++n) {
      const int32_t k =
          rng.below(2) ? borders[rng.below(10)] : 1 + static_cast<int32_t>(rng.below(5000));
      const int32_t q =
          std::min<int32_t>(k, rng.below(4) == 0 ? 150 : 1 + static_cast<int32_t>(rng.below(60)));
      c.lengths.push_back({q, k});
    }
    if (rng.below(5) == 0) c.lengths.push_back({3, 0});  // an unused slot
    if (rng.below(5) == 0) c.lengths.push_back({0, 300});
    cases.push_back(c);
  }
  return cases;
}

TEST(IndexSelectCuda, prefill_equals_reference_over_generated_cases) {
  M3_SKIP_WITHOUT_GPU();
  const std::vector<Case> cases = generated_cases(200);
  int num_different = 0;
  int64_t num_rows = 0;
  const size_t wave = std::max(2u, std::thread::hardware_concurrency());
  for (size_t first = 0; first < cases.size(); first += wave) {
    struct Prepared {
      Data d;
      Selection want;
    };
    std::vector<std::future<Prepared>> prepared;
    for (size_t i = first; i < std::min(cases.size(), first + wave); ++i) {
      prepared.push_back(std::async(std::launch::async, [&c = cases[i]] {
        Prepared p{make_data(c.geometry, c.lengths, DType::kBF16, c.seed), {}};
        set_content(p.d, c.content);
        p.want = select_ref(p.d);
        return p;
      }));
    }
    for (size_t i = 0; i < prepared.size(); ++i) {
      const Case& c = cases[first + i];
      const Prepared p = prepared[i].get();
      const DeviceData gpu(p.d);
      const std::string what =
          fmt::format("case seed {} groups {} topk {} content {}", c.seed, c.geometry.groups,
                      c.geometry.topk, static_cast<int>(c.content));
      SCOPED_TRACE(what);
      const Selection packed = select_gpu(p.d, gpu, KvLayout::kPacked, IndexSelectPath::kPrefill);
      expect_well_formed(p.d, packed);
      if (c.content == Content::kInteger) {
        EXPECT_EQ(packed.ids, p.want.ids) << "exact sums: ids must match bitwise";
      } else {
        num_different += expect_same_ids(p.d, packed, p.want, what);
      }
      num_rows += p.d.T() * p.d.g.groups;
      EXPECT_EQ(packed, select_gpu(p.d, gpu, KvLayout::kPacked, IndexSelectPath::kPrefill))
          << "second run";
      EXPECT_EQ(packed, select_gpu(p.d, gpu, KvLayout::kPaged, IndexSelectPath::kPrefill))
          << "paged";
      if (testing::Test::HasFailure()) return;
    }
  }
  EXPECT_LE(num_different, num_rows / 500) << num_rows << " rows; near-ties are rare";
}

// T19: the same rows in a call whose keys are cut into many pieces and in one where they are not.
TEST(IndexSelectCuda, ids_do_not_depend_on_how_the_keys_are_cut) {
  M3_SKIP_WITHOUT_GPU();
  const MsaGeometry g = fast(4, 16);
  Data d = make_data(g, {{40, 20000}}, DType::kBF16, 7);
  const DeviceData gpu(d);
  const Selection alone = select_gpu(d, gpu, KvLayout::kPacked, IndexSelectPath::kPrefill);
  const Selection general = select_gpu(d, gpu, KvLayout::kPacked, IndexSelectPath::kGeneral);
  expect_same_ids(d, alone, general, "against the general path");
  // The same sequence among 40 others: its pieces become longer.
  std::vector<Lengths> lengths(40, {40, 9000});
  lengths.push_back({40, 20000});
  Data many = make_data(g, lengths, DType::kBF16, 8);
  const int64_t X = g.index_dim, t0 = many.T() - d.T(), s0 = many.S() - d.S();
  for (int64_t i = 0; i < d.qi.tensor().numel(); ++i)
    many.qi.set(t0 * g.groups * X + i, d.qi.get(i));
  for (int64_t i = 0; i < d.ki.tensor().numel(); ++i) many.ki.set(s0 * X + i, d.ki.get(i));
  const DeviceData gpu_many(many);
  const Selection among = select_gpu(many, gpu_many, KvLayout::kPacked, IndexSelectPath::kPrefill);
  for (int r = 0; r < g.groups; ++r) {
    for (int64_t i = 0; i < d.T() * g.topk; ++i) {
      ASSERT_EQ(among.ids[(r * many.T() + t0) * g.topk + i], alone.ids[r * d.T() * g.topk + i])
          << r << " " << i;
    }
  }
}

TEST(IndexSelectCuda, whole_prefill_equals_general_path) {
  M3_SKIP_WITHOUT_GPU();
  Data d = make_data(fast(4, 16), {{6000, 6000}, {700, 4100}}, DType::kBF16, 21);
  const DeviceData gpu(d);
  const Selection want = select_gpu(d, gpu, KvLayout::kPacked, IndexSelectPath::kGeneral);
  const Selection got = select_gpu(d, gpu, KvLayout::kPacked, IndexSelectPath::kPrefill);
  EXPECT_LE(expect_same_ids(d, got, want, "prefill"), d.T() * 4 / 500);
}

TEST(IndexSelectCuda, general_path_equals_reference_over_geometries_types_and_options) {
  M3_SKIP_WITHOUT_GPU();
  const MsaGeometry geometries[] = {
      {.groups = 2, .heads_per_group = 2, .head_dim = 16, .index_dim = 32, .block = 16, .topk = 4},
      {.groups = 3, .heads_per_group = 3, .head_dim = 16, .index_dim = 48, .block = 48, .topk = 2},
      {.groups = 2,
       .heads_per_group = 1,
       .head_dim = 16,
       .index_dim = 64,
       .block = 32,
       .topk = 5,
       .local = 2,
       .init = 1},
      {.groups = 2,
       .heads_per_group = 1,
       .head_dim = 16,
       .index_dim = 256,
       .block = 64,
       .topk = 3,
       .local = 0},
      {.groups = 1,
       .heads_per_group = 1,
       .head_dim = 16,
       .index_dim = 16,
       .block = 160,
       .topk = 2,
       .local = 0,
       .init = 1},
      {.groups = 2,
       .heads_per_group = 1,
       .head_dim = 16,
       .index_dim = 160,
       .block = 16,
       .topk = 64},
      fast(4, 16),
  };
  uint64_t seed = 1;
  for (const MsaGeometry& g : geometries) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (SelectOrder order : {SelectOrder::kAscending, SelectOrder::kScore}) {
        const IndexSelectOptions options{.order = order,
                                         .sel_scores = order == SelectOrder::kScore};
        const int32_t many = (g.topk + 3) * g.block + 5;
        Data d = make_data(g, {{60, many}, {1, many + 1}, {3, g.block + 1}, {0, 7}, {4, 0}}, dtype,
                           seed++);
        if (order == SelectOrder::kScore) set_content(d, Content::kInteger);
        const DeviceData gpu(d);
        const Selection want = select_ref(d, options);
        const Selection got =
            select_gpu(d, gpu, KvLayout::kPacked, IndexSelectPath::kGeneral, options);
        if (order == SelectOrder::kScore) {
          EXPECT_EQ(got, want) << "seed " << d.seed;
        } else {
          expect_same_ids(d, got, want, "general");
        }
        EXPECT_EQ(got, select_gpu(d, gpu, KvLayout::kPaged, IndexSelectPath::kGeneral, options));
      }
    }
  }
}

TEST(IndexSelectCuda, path_follows_types_geometry_and_options) {
  const auto path = [](const MsaGeometry& g, int64_t max_q_len,
                       const IndexSelectOptions& options = {}, DType dtype = DType::kBF16,
                       KvLayout layout = KvLayout::kPaged) {
    const MsaBatch batch{.layout = layout,
                         .num_seqs = 1,
                         .num_queries = max_q_len,
                         .max_q_len = max_q_len,
                         .max_k_len = 131072};
    return index_select_cuda_path(g, batch, options, dtype, dtype);
  };
  const MsaGeometry m3 = fast(4, 16);
  EXPECT_EQ(path(m3, 1), IndexSelectPath::kDecode);
  EXPECT_EQ(path(m3, 16), IndexSelectPath::kDecode);
  EXPECT_EQ(path(m3, 17), IndexSelectPath::kPrefill);
  EXPECT_EQ(path(m3, 131072), IndexSelectPath::kPrefill);
  EXPECT_EQ(path(m3, 1, {}, DType::kBF16, KvLayout::kPacked), IndexSelectPath::kPrefill)
      << "decode reads pages";
  EXPECT_EQ(path(fast(1, 4), 1000), IndexSelectPath::kPrefill);
  EXPECT_EQ(path(fast(4, 8), 1000), IndexSelectPath::kGeneral);
  EXPECT_EQ(path(m3, 1000, {}, DType::kF32), IndexSelectPath::kGeneral);
  EXPECT_EQ(path(m3, 1000, {.order = SelectOrder::kScore}), IndexSelectPath::kGeneral);
  EXPECT_EQ(path(m3, 1000, {.sel_scores = true}), IndexSelectPath::kGeneral);
  MsaGeometry narrow = m3, two_local = m3;
  narrow.index_dim = 64, two_local.local = 2;
  EXPECT_EQ(path(narrow, 1000), IndexSelectPath::kGeneral);
  EXPECT_EQ(path(two_local, 1000), IndexSelectPath::kGeneral);
}

TEST(IndexSelectCuda, operator_takes_the_prefill_path_and_checks_its_inputs) {
  M3_SKIP_WITHOUT_GPU();
  const MsaGeometry g = fast(4, 16);
  Data d = make_data(g, {{200, 3000}}, DType::kBF16, 3);
  const DeviceData gpu(d);
  EXPECT_EQ(index_select_cuda_path(g, gpu.packed, {}, DType::kBF16, DType::kBF16),
            IndexSelectPath::kPrefill);
  EXPECT_EQ(index_select_cuda_path(g, gpu.packed, {}, DType::kF32, DType::kBF16),
            IndexSelectPath::kGeneral);
  const IndexSelectPlan plan = index_select_plan(g, gpu.packed, {}, kGpu);
  const DeviceTensor ids(DType::kI32, {4, d.T(), 16}),
      workspace(DType::kU8, {plan.workspace_bytes});
  index_select(plan, gpu.packed, gpu.qi.tensor(), gpu.ki.tensor(), ids.tensor(), {},
               workspace.tensor().data());
  expect_same_ids(d, {ids.download<int32_t>(), {}}, select_ref(d), "operator");
  MsaBatch larger = gpu.packed;
  larger.num_queries += 1;
  EXPECT_THROW(index_select(plan, larger, gpu.qi.tensor(), gpu.ki.tensor(), ids.tensor(), {},
                            workspace.tensor().data()),
               Error);
}

}  // namespace
}  // namespace m3
