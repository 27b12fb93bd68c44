// Names T01.. refer to msa.md §15.
#include "ops/index_select/index_select.h"

#include <gtest/gtest.h>

#include "base/threads.h"
#include "ops/common/msa_test_data.h"
#include "ops/index_select/index_select_expect.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using namespace msa_test;

// Outputs are poisoned first, so that an element nobody writes shows (T41).
template <typename Run>
Selection collect(const Data& d, const IndexSelectOptions& options, const Run& run) {
  const int64_t count = d.g.groups * d.T() * d.g.topk;
  Selection s{std::vector<int32_t>(count + 1, 1 << 29), std::vector<float>(options.sel_scores ? count : 0, kNan)};
  const Shape shape{d.g.groups, d.T(), d.g.topk};
  run(Tensor(s.ids.data(), DType::kI32, shape),
      options.sel_scores ? Tensor(s.scores.data(), DType::kF32, shape) : Tensor());
  EXPECT_EQ(s.ids.back(), 1 << 29) << "written beyond the end";
  s.ids.pop_back();
  return s;
}

Selection select(const Data& d, const MsaBatch& batch, const IndexSelectOptions& options = {}) {
  const Tensor ki = batch.layout == KvLayout::kPaged ? d.x_pages.tensor() : d.ki.tensor();
  return collect(d, options, [&](const Tensor& ids, const Tensor& scores) {
    const IndexSelectPlan plan = index_select_plan(d.g, batch, options);
    const Workspace workspace(plan.workspace_bytes);
    index_select(plan, batch, d.qi.tensor(), ki, ids, scores, workspace.get());
  });
}

Selection select_ref(const Data& d, const IndexSelectOptions& options = {}) {
  return collect(d, options, [&](const Tensor& ids, const Tensor& scores) {
    index_select_ref(d.g, d.packed(), options, d.qi.tensor(), d.ki.tensor(), ids, scores);
  });
}

MsaGeometry small(int topk = 4) {
  return {.groups = 2, .heads_per_group = 2, .head_dim = 16, .index_dim = 32, .block = 16, .topk = topk};
}

class IndexSelect : public ::testing::Test {
 protected:
  void TearDown() override { set_num_threads(0); }
};

TEST_F(IndexSelect, equals_reference_over_geometries_types_layouts_and_instruction_sets) {
  const MsaGeometry geometries[] = {
      small(),
      {.groups = 1, .heads_per_group = 1, .head_dim = 16, .index_dim = 128, .block = 128, .topk = 16},
      {.groups = 3, .heads_per_group = 3, .head_dim = 16, .index_dim = 48, .block = 48, .topk = 2},
      {.groups = 4, .heads_per_group = 1, .head_dim = 16, .index_dim = 37, .block = 20, .topk = 1},
      {.groups = 2, .heads_per_group = 1, .head_dim = 16, .index_dim = 64, .block = 32, .topk = 5, .local = 2, .init = 1},
      {.groups = 2, .heads_per_group = 1, .head_dim = 16, .index_dim = 256, .block = 64, .topk = 3, .local = 0},
      {.groups = 1, .heads_per_group = 1, .head_dim = 16, .index_dim = 16, .block = 160, .topk = 2, .local = 0, .init = 1},
      {.groups = 2, .heads_per_group = 1, .head_dim = 16, .index_dim = 160, .block = 16, .topk = 64},
  };
  int num_different = 0;
  int64_t num_rows = 0;
  uint64_t seed = 1;
  for (const MsaGeometry& g : geometries) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const int32_t many = (g.topk + 3) * g.block + 5;
      const Data d = make_data(g, {{many, many}, {1, many + 1}, {3, g.block + 1}, {0, 7}, {g.block, g.block}}, dtype, seed++);
      const Selection want = select_ref(d);
      expect_well_formed(d, want);
      testing::for_each_isa([&] {
        const Selection packed = select(d, d.packed());
        num_different += expect_same_ids(d, packed, want, std::string(cpu_isa_name(cpu_isa())) + " " + dtype_name(dtype));
        num_rows += d.T() * g.groups;
        expect_well_formed(d, packed);
        EXPECT_EQ(packed, select(d, d.paged())) << "T24, T31: layout or physical order shows; seed " << d.seed;
      });
    }
  }
  // Near-ties are the exception: fp32 sums of unit-variance data swap blocks in far fewer than 1 of 1000 rows.
  EXPECT_LE(num_different, num_rows / 1000) << num_rows << " rows";
}

TEST_F(IndexSelect, scores_and_score_order_equal_reference) {
  const MsaGeometry geometries[] = {small(5), {.groups = 2, .heads_per_group = 1, .head_dim = 16, .index_dim = 32,
                                               .block = 16, .topk = 5, .local = 2, .init = 1}};
  for (const MsaGeometry& g : geometries) {
    const Data d = make_data(g, {{200, 200}, {2, 151}}, DType::kF32, 40);
    for (SelectOrder order : {SelectOrder::kAscending, SelectOrder::kScore}) {
      const IndexSelectOptions options{.order = order, .sel_scores = true};
      const Selection want = select_ref(d, options), got = select(d, d.packed(), options);
      ASSERT_EQ(got.ids, want.ids);
      for (size_t i = 0; i < want.scores.size(); ++i) {
        if (std::isinf(want.scores[i])) {
          EXPECT_EQ(got.scores[i], want.scores[i]);
        } else {
          EXPECT_NEAR(got.scores[i], want.scores[i], 3e-5 * 32) << "slot " << i;
        }
      }
    }
  }
}

TEST_F(IndexSelect, score_order_contains_every_smaller_selection) {
  const Data d = make_data(small(6), {{300, 300}}, DType::kF32, 41);
  const Selection six = select(d, d.packed(), {.order = SelectOrder::kScore});
  for (int smaller = 1; smaller < 6; ++smaller) {
    Data e = d;
    e.g.topk = smaller;
    const Selection want = select(e, e.packed());
    for (int64_t row = 0; row < d.T() * d.g.groups; ++row) {
      const int32_t* list = &six.ids[row * 6];
      const int num = static_cast<int>(std::count_if(list, list + 6, [](int32_t id) { return id >= 0; }));
      std::set<int32_t> prefix(list, list + std::min(smaller, num) - 1);
      prefix.insert(list[num - 1]);  // the own block closes the list
      std::set<int32_t> chosen(&want.ids[row * smaller], &want.ids[row * smaller] + smaller);
      chosen.erase(-1);
      ASSERT_EQ(prefix, chosen) << "row " << row << " of topk " << smaller;
    }
  }
}

TEST_F(IndexSelect, T01_up_to_topk_blocks_needs_no_scores) {
  Data d = make_data(small(), {{64, 64}}, DType::kF32, 2);
  d.qi.fill(kNan);
  d.ki.fill(kNan);
  const Selection s = select(d, d.packed());
  for (int64_t t = 0; t < 64; ++t) {
    for (int slot = 0; slot < 4; ++slot) EXPECT_EQ(s.ids[t * 4 + slot], slot <= t / 16 ? slot : -1);
  }
}

TEST_F(IndexSelect, T02_first_row_beyond_topk_blocks_drops_exactly_one) {
  const MsaGeometry g = msa_geometry_m3();
  const Data d = make_data(g, {{1, 2049}}, DType::kBF16, 3);
  const Selection s = select(d, d.packed());
  EXPECT_EQ(s, select_ref(d));
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(std::set<int32_t>(&s.ids[r * 16], &s.ids[r * 16] + 16).size(), 16u);
    EXPECT_EQ(s.ids[r * 16 + 15], 16) << "the own block stays";
  }
}

TEST_F(IndexSelect, T03_lengths_around_borders_in_one_batch) {
  const std::vector<Lengths> lengths = {{1, 1}, {1, 127}, {1, 128}, {1, 129}, {1, 255}, {1, 2047}, {1, 2048}, {1, 2049}, {1, 32769}};
  MsaGeometry g = msa_geometry_m3();
  g.head_dim = 1;  // unused here
  const Data d = make_data(g, lengths, DType::kBF16, 4);
  const Selection want = select_ref(d);
  testing::for_each_isa([&] {
    expect_same_ids(d, select(d, d.packed()), want, "T03");
    expect_same_ids(d, select(d, d.paged()), want, "T03 paged");
  });
}

TEST_F(IndexSelect, T04_T05_own_block_is_forced_at_its_first_and_last_token) {
  for (int32_t length : {16 * 9 + 1, 16 * 10}) {  // the own block holds 1 or 16 visible tokens
    Data d = make_data(small(), {{1, length}}, DType::kF32, 5);
    for (int64_t j = (length - 1) / 16 * 16; j < length; ++j) {
      for (int c = 0; c < 32; ++c) d.ki.set(j * 32 + c, -1e3f * d.qi.get(c));  // the worst scores of all
    }
    const Selection s = select(d, d.packed());
    EXPECT_EQ(s.ids[3], 9) << "length " << length;
  }
}

TEST_F(IndexSelect, T06_groups_with_opposite_preferences_get_different_lists) {
  Data d = make_data(small(), {{1, 16 * 12}}, DType::kF32, 6);
  for (int c = 0; c < 32; ++c) d.qi.set(32 + c, -d.qi.get(c));
  const Selection s = select(d, d.packed());
  EXPECT_EQ(s, select_ref(d));
  EXPECT_FALSE(std::equal(&s.ids[0], &s.ids[3], &s.ids[4])) << "history of both groups equal";
}

TEST_F(IndexSelect, T07_own_block_with_the_best_score_is_listed_once) {
  Data d = make_data(small(), {{1, 16 * 12}}, DType::kF32, 7);
  for (int c = 0; c < 32; ++c) d.ki.set((16 * 12 - 1) * 32 + c, 100 * d.qi.get(c));
  const Selection s = select(d, d.packed());
  expect_well_formed(d, s);
  EXPECT_EQ(s, select_ref(d));
}

TEST_F(IndexSelect, T08_future_key_of_the_own_block_does_not_count_without_forced_blocks) {
  MsaGeometry g = small(2);
  g.local = 0;
  Data d = make_data(g, {{100, 100}}, DType::kF32, 8);
  for (int c = 0; c < 32; ++c) d.ki.set(95 * 32 + c, 1e6f * d.qi.get((90 * 2) * 32 + c));  // row 90 must not see key 95
  testing::for_each_isa([&] {
    EXPECT_EQ(select(d, d.packed()), select_ref(d)) << cpu_isa_name(cpu_isa());
  });
}

TEST_F(IndexSelect, T09_exact_ties_prefer_the_lower_id_and_zeros_of_both_signs_tie) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Data d = make_data(small(), {{400, 400}, {5, 399}}, dtype, 9);
    Philox rng(9, 1);
    for (int64_t i = 0; i < d.T() * 64; ++i) d.qi.set(i, static_cast<float>(rng.below(3)) - 1);
    for (int64_t i = 0; i < d.S() * 32; ++i) d.ki.set(i, static_cast<float>(rng.below(3)) - 1);
    const Selection ties = select_ref(d);
    testing::for_each_isa([&] {
      EXPECT_EQ(select(d, d.packed()), ties) << cpu_isa_name(cpu_isa());
    });
    d.qi.fill(0.0f);
    for (int64_t i = 0; i < d.S() * 32; ++i) d.ki.set(i, rng.below(2) == 0 ? -1.0f : 1.0f);  // products +0 and -0
    testing::for_each_isa([&] {
      const Selection zeros = select(d, d.packed());
      for (int slot = 0; slot < 3; ++slot) EXPECT_EQ(zeros.ids[399 * 4 + slot], slot) << cpu_isa_name(cpu_isa());
      EXPECT_EQ(zeros, select_ref(d)) << cpu_isa_name(cpu_isa());
    });
  }
}

TEST_F(IndexSelect, T10_nan_and_infinities_keep_lists_whole) {
  Data d = make_data(small(), {{200, 200}, {3, 150}}, DType::kF32, 10);
  d.ki.set(20 * 32 + 3, kNan);
  d.ki.set(37 * 32, kNan);
  for (int j = 64; j < 80; ++j) d.ki.set(j * 32 + 5, kNan);
  d.ki.set(100 * 32 + 7, kInf);
  d.ki.set(130 * 32 + 1, -kInf);
  d.qi.set((150 * 2) * 32 + 2, kNan);
  testing::for_each_isa([&] {
    const Selection s = select(d, d.packed());
    expect_well_formed(d, s);
    EXPECT_EQ(s, select_ref(d)) << cpu_isa_name(cpu_isa());
    for (float all : {kNan, -kInf, kInf}) {
      Data e = d;
      e.ki.fill(all);
      const Selection t = select(e, e.packed());
      expect_well_formed(e, t);
      EXPECT_EQ(t, select_ref(e)) << cpu_isa_name(cpu_isa()) << " all keys " << all;
    }
  });
}

TEST_F(IndexSelect, T11_forced_blocks_stay_whatever_the_scores) {
  MsaGeometry g = small();
  g.init = 1;
  Data d = make_data(g, {{180, 180}}, DType::kF32, 11);
  for (int64_t i = 0; i < d.T() * 64; ++i) d.qi.set(i, d.qi.get(i) * 1e18f);
  for (int64_t i = 0; i < d.S() * 32; ++i) d.ki.set(i, d.ki.get(i) * 1e18f);
  for (int c = 0; c < 32; ++c) d.ki.set(40 * 32 + c, kInf);
  testing::for_each_isa([&] {
    const Selection s = select(d, d.packed());
    expect_well_formed(d, s);
    for (int64_t t = 80; t < 180; ++t) EXPECT_EQ(s.ids[t * 4], 0) << "initial block of row " << t;
    EXPECT_EQ(s, select_ref(d)) << cpu_isa_name(cpu_isa());
  });
}

TEST_F(IndexSelect, T12_initial_and_local_blocks_overlap_near_the_start) {
  for (int local : {1, 2, 3}) {
    for (int init : {0, 1, 2}) {
      MsaGeometry g = small(5);
      g.local = local;
      g.init = init;
      const Data d = make_data(g, {{260, 260}, {4, 33}}, DType::kF32, 12);
      const Selection s = select(d, d.packed());
      expect_well_formed(d, s);
      EXPECT_EQ(s, select_ref(d)) << "local " << local << " init " << init;
    }
  }
}

TEST_F(IndexSelect, T14_square_shapes_do_not_confuse_layouts) {
  for (int32_t T : {1, 2, 4}) {
    MsaGeometry g = small(T == 1 ? 4 : T);
    const Data d = make_data(g, {{T, 16 * 9 + 3}}, DType::kF32, 14);
    EXPECT_EQ(select(d, d.packed()), select_ref(d)) << "T = " << T;
  }
}

TEST_F(IndexSelect, T15_a_million_tokens_have_8192_blocks) {
  MsaGeometry g{.groups = 1, .heads_per_group = 1, .head_dim = 1, .index_dim = 2, .block = 128, .topk = 16};
  Data d = make_data(g, {{1, 1 << 20}}, DType::kBF16, 15);
  d.ki.fill(0.0f);
  d.qi.fill(1.0f);
  std::vector<int32_t> want;
  for (int i = 0; i < 15; ++i) {  // one loud key in each of 15 blocks, the last history block among them
    want.push_back(8190 - 546 * (14 - i));
    d.ki.set((want.back() * int64_t{128} + 127) * 2, 1.0f + static_cast<float>(i));
  }
  want.push_back(8191);
  EXPECT_EQ(select(d, d.packed()).ids, want);
}

TEST_F(IndexSelect, T17_page_size_must_equal_the_block) {
  Data d = make_data(small(), {{5, 100}}, DType::kF32, 17);
  d.g.block = 32;
  try {
    select(d, d.paged());
    FAIL() << "pages of 16 were taken for blocks of 32";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("ki must be"), std::string::npos) << error.what();
  }
}

TEST_F(IndexSelect, T13_T19_T32_neither_chunks_nor_threads_nor_neighbours_show) {
  const MsaGeometry g{.groups = 2, .heads_per_group = 1, .head_dim = 16, .index_dim = 64, .block = 16, .topk = 4};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const Data d = make_data(g, {{700, 700}, {13, 13}, {211, 555}}, dtype, 19);
    const Selection whole = select(d, d.packed());
    for (int threads : {1, 2, 3, 7}) {  // more threads cut the keys into more ranges
      set_num_threads(threads);
      EXPECT_EQ(select(d, d.packed()), whole) << threads << " threads";
      for (int32_t chunk : {1, 15, 16, 17, 128, 699}) {  // the last `chunk` rows of the first sequence alone (T27, T28)
        Data e = make_data(g, {{chunk, 700}}, dtype, 20);
        std::copy_n(static_cast<const char*>(d.ki.tensor().data()), 700 * 64 * dtype_bytes(dtype),
                    static_cast<char*>(e.ki.tensor().data()));
        std::copy_n(static_cast<const char*>(d.qi.tensor().data()) + (700 - chunk) * 128 * dtype_bytes(dtype),
                    chunk * 128 * dtype_bytes(dtype), static_cast<char*>(e.qi.tensor().data()));
        const Selection part = select(e, e.packed());
        for (int r = 0; r < 2; ++r) {
          EXPECT_TRUE(std::equal(&part.ids[r * chunk * 4], &part.ids[r * chunk * 4] + chunk * 4,
                                 &whole.ids[(r * d.T() + 700 - chunk) * 4]))
              << "chunk " << chunk << " group " << r << " threads " << threads;
        }
      }
    }
  }
}

TEST_F(IndexSelect, T21_T22_nan_tails_and_garbage_page_entries_have_no_effect) {
  // Data::fill_pages poisons both; without forced blocks even the open page is scored.
  MsaGeometry g = small();
  g.local = 0;
  for (int32_t length : {100, 101, 111, 112, 113}) {
    const Data d = make_data(g, {{3, length}, {1, length + 7}}, DType::kBF16, 21);
    EXPECT_EQ(select(d, d.paged()), select_ref(d)) << length;
  }
}

TEST_F(IndexSelect, T25_T26_unused_slots_and_empty_batches) {
  const Data d = make_data(small(), {{2, 0}, {1, 130}, {4, 0}, {0, 50}, {2, 40}}, DType::kF32, 25);
  const Selection s = select(d, d.paged());
  expect_well_formed(d, s);
  EXPECT_EQ(s, select_ref(d));
  const Data none = make_data(small(), {}, DType::kF32, 26);
  EXPECT_TRUE(select(none, none.packed()).ids.empty());
  const Data idle = make_data(small(), {{0, 10}, {0, 0}}, DType::kF32, 27);
  EXPECT_TRUE(select(idle, idle.paged()).ids.empty());
}

TEST_F(IndexSelect, fragments_of_one_document_share_its_keys) {
  // Rows 96..127 and 200..255 of one document as two fragments, then another document (msa.md §11).
  const MsaGeometry g = small();
  const Data whole = make_data(g, {{256, 256}, {60, 60}}, DType::kF32, 28);
  Data d = make_data(g, {{32, 128}, {56, 128}, {60, 60}}, DType::kF32, 29);
  const std::vector<int32_t> lead = {0, 0, 2};
  const auto copy_rows = [](const Buffer& from, int64_t from_row, Buffer& to, int64_t to_row, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count * width; ++i) to.set(to_row * width + i, from.get(from_row * width + i));
  };
  copy_rows(whole.ki, 0, d.ki, 0, 316, 32);
  copy_rows(whole.qi, 96, d.qi, 0, 32, 64);
  copy_rows(whole.qi, 200, d.qi, 32, 56, 64);
  copy_rows(whole.qi, 256, d.qi, 88, 60, 64);
  MsaBatch batch = d.packed();
  batch.lead = lead.data();
  const Selection got = select(d, batch), want = select(whole, whole.packed());
  for (int r = 0; r < 2; ++r) {
    for (int64_t t = 0; t < 148; ++t) {
      const int64_t from = t < 32 ? t + 96 : t < 88 ? t + 168 : t + 168;
      for (int slot = 0; slot < 4; ++slot) {
        ASSERT_EQ(got.ids[(r * 148 + t) * 4 + slot], want.ids[(r * 316 + from) * 4 + slot]) << "row " << t;
      }
    }
  }
}

TEST_F(IndexSelect, refuses_what_it_does_not_support_by_name) {
  const Data d = make_data(small(), {{5, 100}}, DType::kF32, 30);
  MsaGeometry g = small();
  g.topk = 129;
  EXPECT_THROW(index_select_plan(g, d.packed(), {}), Error);
  g = small();
  g.local = 3;
  g.init = 2;
  EXPECT_THROW(index_select_plan(g, d.packed(), {}), Error);
  const IndexSelectPlan plan = index_select_plan(small(), d.packed(), {});
  const Data other = make_data(small(), {{6, 100}}, DType::kF32, 31);
  const Workspace workspace(plan.workspace_bytes);
  Buffer ids(DType::kI32, {2, 6, 4});
  EXPECT_THROW(index_select(plan, other.packed(), other.qi.tensor(), other.ki.tensor(), ids.tensor(), {}, workspace.get()),
               Error);
}

}  // namespace
}  // namespace m3
