#include "ops/dsa_select/dsa_select.h"

#include <gtest/gtest.h>

#include "base/threads.h"
#include "ops/common/msa_test_data.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using namespace msa_test;

// Queries and weights beside the sequences of Data, whose ki are the index keys.
struct DsaData {
  Data d;
  DsaGeometry g;
  Buffer qx, w;

  DsaData(int heads, int index_dim, int64_t budget, const std::vector<Lengths>& lengths, DType dtype, uint64_t seed)
      : d(make_data({.groups = 1, .heads_per_group = 1, .head_dim = 1, .index_dim = index_dim, .block = 16, .topk = 4},
                    lengths, dtype, seed)),
        g{.heads = heads, .index_dim = index_dim, .block = 16, .budget = budget},
        qx(dtype, {d.T(), heads, index_dim}),
        w(DType::kF32, {d.T(), heads}) {
    fill_normal(qx, seed, 20);
    fill_normal(w, seed, 21);
  }

  std::vector<int32_t> run(const MsaBatch& batch) const {
    Buffer tokens(DType::kI32, {d.T(), g.budget});
    tokens.fill_ints(1 << 29);
    const DsaSelectPlan plan = dsa_select_plan(g, batch);
    const Workspace workspace(plan.workspace_bytes);
    dsa_select(plan, batch, qx.tensor(), batch.layout == KvLayout::kPaged ? d.x_pages.tensor() : d.ki.tensor(), w.tensor(),
               tokens.tensor(), workspace.get());
    return {tokens.tensor().ptr<int32_t>(), tokens.tensor().ptr<int32_t>() + d.T() * g.budget};
  }
  std::vector<int32_t> run_ref() const {
    Buffer tokens(DType::kI32, {d.T(), g.budget});
    dsa_select_ref(g, d.packed(), qx.tensor(), d.ki.tensor(), w.tensor(), tokens.tensor());
    return {tokens.tensor().ptr<int32_t>(), tokens.tensor().ptr<int32_t>() + d.T() * g.budget};
  }
};

// I of one (row, key), fp64.
double score(const DsaData& x, int64_t t, int64_t key_row) {
  double sum = 0;
  for (int a = 0; a < x.g.heads; ++a) {
    double dot = 0;
    for (int c = 0; c < x.g.index_dim; ++c) {
      dot += double(x.qx.get((t * x.g.heads + a) * x.g.index_dim + c)) * x.d.ki.get(key_row * x.g.index_dim + c);
    }
    sum += x.w.get(t * x.g.heads + a) * std::max(dot, 0.0);
  }
  return sum;
}

TEST(DsaSelect, equals_reference_outside_near_ties) {
  int64_t num_different = 0, num_rows = 0;
  const DsaData cases[] = {{6, 32, 48, {{150, 150}, {3, 200}, {0, 9}}, DType::kF32, 1},
                           {64, 128, 20, {{20, 150}, {1, 300}}, DType::kBF16, 2},
                           {100, 37, 17, {{40, 40}, {2, 131}}, DType::kBF16, 3}};
  for (const DsaData& x : cases) {
    const auto want = x.run_ref();
    testing::for_each_isa([&] {
      const auto got = x.run(x.d.packed());
      EXPECT_EQ(got, x.run(x.d.paged())) << "layout shows";
      for (int n = 0; n < x.d.num_seqs(); ++n) {
        for (int64_t t = x.d.cu_q[n]; t < x.d.cu_q[n + 1]; ++t, ++num_rows) {
          const std::vector<int32_t> a(&got[t * x.g.budget], &got[t * x.g.budget] + x.g.budget);
          const std::vector<int32_t> b(&want[t * x.g.budget], &want[t * x.g.budget] + x.g.budget);
          if (a == b) continue;
          ++num_different;
          double last = INFINITY;
          for (int32_t j : b) last = std::min(last, score(x, t, x.d.cu_k[n] + j));
          for (int32_t j : a) EXPECT_GE(score(x, t, x.d.cu_k[n] + j), last - 1e-3) << "row " << t << " token " << j;
        }
      }
    });
  }
  EXPECT_LE(num_different, num_rows / 100);
}

TEST(DsaSelect, ties_prefer_the_lower_position_and_nan_ranks_last) {
  DsaData x(2, 16, 10, {{60, 60}}, DType::kF32, 4);
  Philox rng(4);
  for (int64_t i = 0; i < 60 * 16; ++i) x.d.ki.set(i, static_cast<float>(rng.below(3)) - 1);
  for (int64_t i = 0; i < 60 * 32; ++i) x.qx.set(i, static_cast<float>(rng.below(3)) - 1);
  x.w.fill(1.0f);
  x.d.ki.set(5 * 16, kNan);
  testing::for_each_isa([&] {
    const auto got = x.run(x.d.packed());
    EXPECT_EQ(got, x.run_ref());
    for (int64_t t = 10; t < 60; ++t) EXPECT_EQ(std::count(&got[t * 10], &got[t * 10] + 10, 5), 0) << "row " << t;
  });
}

TEST(DsaSelect, short_rows_take_all_and_empty_rows_none) {
  const DsaData x(3, 16, 50, {{20, 20}, {2, 0}}, DType::kF32, 5);
  const auto got = x.run(x.d.packed());
  for (int64_t t = 0; t < 22; ++t) {
    for (int slot = 0; slot < 50; ++slot) EXPECT_EQ(got[t * 50 + slot], t < 20 && slot <= t ? slot : -1) << "row " << t;
  }
}

TEST(DsaSelect, threads_do_not_show) {
  const DsaData x(6, 32, 30, {{30, 400}, {1, 77}}, DType::kBF16, 6);
  const auto one = x.run(x.d.packed());
  for (int threads : {1, 2, 5}) {
    set_num_threads(threads);
    EXPECT_EQ(x.run(x.d.packed()), one) << threads;
  }
  set_num_threads(0);
}

}  // namespace
}  // namespace m3
