// Names T29.. refer to msa.md §15.
#include "ops/cache_append/cache_append.h"

#include <gtest/gtest.h>

#include "ops/attend/attend.h"
#include "ops/common/msa_test_data.h"
#include "ops/common/testing.h"
#include "ops/index_select/index_select.h"

namespace m3 {
namespace {

using namespace msa_test;

MsaGeometry small() {
  return {.groups = 2, .heads_per_group = 2, .head_dim = 24, .index_dim = 16, .block = 16, .topk = 4};
}

// The pages of Data, poisoned, and the rows of a step: the last q positions of every sequence.
struct Step {
  Buffer k, v, ki, k_pages, v_pages, x_pages;

  Step(const Data& d, DType cache_dtype) {
    const MsaGeometry& g = d.g;
    k = Buffer(d.k.tensor().dtype(), {d.T(), g.groups, g.head_dim});
    v = Buffer(d.k.tensor().dtype(), {d.T(), g.groups, g.head_dim});
    ki = Buffer(d.ki.tensor().dtype(), {d.T(), g.index_dim});
    fill_normal(k, d.seed, 10);
    fill_normal(v, d.seed, 11);
    fill_normal(ki, d.seed, 12);
    k_pages = Buffer(cache_dtype, {d.num_pages, g.groups, g.block, g.head_dim});
    v_pages = Buffer(cache_dtype, {d.num_pages, g.groups, g.block, g.head_dim});
    x_pages = Buffer(cache_dtype, {d.num_pages, g.block, g.index_dim});
    for (Buffer* lane : {&k_pages, &v_pages, &x_pages}) lane->fill(kNan);
  }
  void append(const Data& d) const {
    cache_append(d.paged(), k.tensor(), v.tensor(), ki.tensor(), k_pages.tensor(), v_pages.tensor(), x_pages.tensor());
  }
};

float as_stored(float value, DType from, DType to) {
  return from == DType::kF32 && to == DType::kBF16 ? to_float(bf16(value)) : value;
}

TEST(CacheAppend, writes_new_rows_of_all_lanes_and_nothing_else) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (DType cache_dtype : {DType::kF32, DType::kBF16}) {
      const Data d = make_data(small(), {{1, 1}, {5, 18}, {40, 100}, {0, 20}, {2, 0}, {16, 48}}, dtype, 1);
      const Step step(d, cache_dtype);
      step.append(d);
      const MsaGeometry& g = d.g;
      int64_t num_written = 0;
      for (int n = 0; n < d.num_seqs(); ++n) {
        const int64_t q_len = d.cu_q[n + 1] - d.cu_q[n];
        for (int64_t i = 0; i < q_len && d.seq_lens[n] > 0; ++i) {
          const int64_t p = d.seq_lens[n] - q_len + i, t = d.cu_q[n] + i;
          const int64_t page = d.page_table[n * d.max_pages + p / 16], slot = p % 16;
          for (int c = 0; c < g.index_dim; ++c) {
            ASSERT_EQ(step.x_pages.get((page * 16 + slot) * g.index_dim + c), as_stored(step.ki.get(t * g.index_dim + c), dtype, cache_dtype));
          }
          for (int r = 0; r < 2; ++r) {
            for (int c = 0; c < g.head_dim; ++c) {
              const int64_t at = ((page * 2 + r) * 16 + slot) * g.head_dim + c, from = (t * 2 + r) * g.head_dim + c;
              ASSERT_EQ(step.k_pages.get(at), as_stored(step.k.get(from), dtype, cache_dtype)) << "sequence " << n << " position " << p;
              ASSERT_EQ(step.v_pages.get(at), as_stored(step.v.get(from), dtype, cache_dtype));
            }
          }
          ++num_written;
        }
      }
      const auto count = [](const Buffer& pages) {
        int64_t finite = 0;
        for (int64_t i = 0; i < pages.tensor().numel(); ++i) finite += !std::isnan(pages.get(i));
        return finite;
      };
      EXPECT_EQ(count(step.k_pages), num_written * 2 * g.head_dim) << "written outside the new rows";
      EXPECT_EQ(count(step.v_pages), num_written * 2 * g.head_dim);
      EXPECT_EQ(count(step.x_pages), num_written * g.index_dim);
    }
  }
}

TEST(CacheAppend, dense_layers_have_no_index_lane_and_lanes_must_agree) {
  const Data d = make_data(small(), {{5, 18}}, DType::kF32, 2);
  const Step step(d, DType::kF32);
  cache_append(d.paged(), step.k.tensor(), step.v.tensor(), {}, step.k_pages.tensor(), step.v_pages.tensor(), {});
  EXPECT_TRUE(std::isnan(step.x_pages.get(0)));
  EXPECT_THROW(cache_append(d.paged(), step.k.tensor(), step.v.tensor(), step.ki.tensor(), step.k_pages.tensor(),
                            step.v_pages.tensor(), {}), Error);
  EXPECT_THROW(cache_append(d.packed(), step.k.tensor(), step.v.tensor(), step.ki.tensor(), step.k_pages.tensor(),
                            step.v_pages.tensor(), step.x_pages.tensor()), Error);
  Data far = d;
  far.page_table[1] = 1 << 20;
  EXPECT_THROW(step.append(far), Error);
}

// Rows [begin, end) of a tensor whose first axis is tokens.
Tensor rows(const Buffer& buffer, int64_t begin, int64_t end) { return buffer.tensor().rows(begin, end); }

// T29..T32: a sequence grows in pages in steps of several sizes, beside another one in the same pool; its rows equal those
// of one prefill over packed keys: ids in every bit, O up to the rounding of the decode path.
TEST(CacheAppend, T27_T28_T31_growing_step_by_step_equals_one_prefill) {
  const MsaGeometry g = small();
  const Data d = make_data(g, {{230, 230}, {190, 190}}, DType::kBF16, 3);
  testing::for_each_isa([&] {
    Buffer ids(DType::kI32, {2, 420, 4}), o(DType::kF32, {420, 4, 24});
    const IndexSelectPlan select_plan = index_select_plan(g, d.packed(), {});
    index_select(select_plan, d.packed(), d.qi.tensor(), d.ki.tensor(), ids.tensor(), {}, Workspace(select_plan.workspace_bytes).get());
    const AttendOptions options{.compute = MsaCompute::kF32};
    const AttendPlan whole_plan = attend_plan(g, d.packed(), options);
    attend(whole_plan, d.packed(), d.q.tensor(), d.k.tensor(), d.v.tensor(), ids.tensor(), o.tensor(), {},
           Workspace(whole_plan.workspace_bytes).get());

    Step cache(d, DType::kBF16);
    const int32_t steps[] = {1, 15, 1, 30, 2, 16, 63, 4, 1, 1, 40};
    int32_t done[2] = {0, 0};
    for (int round = 0; done[0] < 230 || done[1] < 190; ++round) {
      const int n = round % 2;
      const int32_t begin = done[n], length = std::min(steps[round % 11], d.seq_lens[n] - begin);
      if (length == 0) {
        continue;
      }
      const int32_t cu_q[] = {0, length}, seq_len[] = {begin + length};
      const MsaBatch batch{.layout = KvLayout::kPaged, .num_seqs = 1, .num_queries = length, .cu_q = cu_q, .seq_lens = seq_len,
                           .page_table = d.page_table.data() + n * d.max_pages, .max_pages = d.max_pages};
      const int64_t t = d.cu_q[n] + begin;  // packed row of the first new token; here k rows and q rows agree
      cache_append(batch, rows(d.k, t, t + length), rows(d.v, t, t + length), rows(d.ki, t, t + length),
                   cache.k_pages.tensor(), cache.v_pages.tensor(), cache.x_pages.tensor());
      Buffer step_ids(DType::kI32, {2, length, 4}), step_o(DType::kF32, {length, 4, 24});
      const IndexSelectPlan plan = index_select_plan(g, batch, {});
      index_select(plan, batch, rows(d.qi, t, t + length), cache.x_pages.tensor(), step_ids.tensor(), {},
                   Workspace(plan.workspace_bytes).get());
      const AttendPlan step_plan = attend_plan(g, batch, options);
      attend(step_plan, batch, rows(d.q, t, t + length), cache.k_pages.tensor(), cache.v_pages.tensor(), step_ids.tensor(),
             step_o.tensor(), {}, Workspace(step_plan.workspace_bytes).get());
      for (int r = 0; r < 2; ++r) {
        for (int64_t i = 0; i < length * 4; ++i) {
          ASSERT_EQ(step_ids.tensor().ptr<int32_t>()[r * length * 4 + i], ids.tensor().ptr<int32_t>()[(r * 420 + t) * 4 + i])
              << "sequence " << n << " position " << begin + i / 4;
        }
      }
      for (int64_t i = 0; i < length * 96; ++i) ASSERT_NEAR(step_o.get(i), o.get(t * 96 + i), 2e-6) << "position " << begin + i / 96;
      done[n] += length;
    }
  });
}

}  // namespace
}  // namespace m3
