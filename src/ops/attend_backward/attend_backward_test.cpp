#include "ops/attend_backward/attend_backward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/cpu_features.h"
#include "base/threads.h"
#include "ops/attend/attend.h"
#include "ops/common/backward_test_data.h"
#include "ops/index_select/index_select.h"

namespace m3 {
namespace {

using msa_test::fresh_seed;
using msa_test::max_row_error;
using Case = msa_test::BackwardCase;

MsaGeometry geometry(int groups, int heads_per_group, int dim, int block, int topk) {
  return {.groups = groups, .heads_per_group = heads_per_group, .head_dim = dim, .index_dim = dim, .block = block, .topk = topk};
}

std::vector<Case> cases() {
  return {
      {"msa", geometry(2, 2, 32, 16, 3), {0, 90, 91, 151, 188}, {0, 90, 91, 151, 188}, {}, AttendSupport::blocks()},
      {"msa_odd", geometry(3, 3, 20, 24, 5), {0, 40, 40, 61}, {0, 140, 150, 171}, {}, AttendSupport::blocks()},
      {"msa_large_block", geometry(1, 2, 16, 160, 2), {0, 500}, {0, 500}, {}, AttendSupport::blocks()},
      {"msa_m3_heads", geometry(1, 16, 128, 128, 2), {0, 300, 333}, {0, 400, 433}, {}, AttendSupport::blocks()},
      {"full", geometry(2, 2, 32, 16, 4), {0, 80, 113}, {0, 80, 200}, {}, AttendSupport::full()},
      {"full_one_head", geometry(4, 1, 48, 16, 4), {0, 1, 130}, {0, 1, 130}, {}, AttendSupport::full()},
      {"window", geometry(2, 2, 32, 16, 4), {0, 280, 313}, {0, 280, 313}, {}, AttendSupport::sliding(24, 2)},
      {"tokens", geometry(2, 2, 32, 16, 4), {0, 200, 213}, {0, 200, 300}, {}, AttendSupport::tokens(17)},
      {"long", geometry(1, 2, 16, 16, 4), {0, 1100}, {0, 1100}, {}, AttendSupport::full()},
      {"fragments", geometry(2, 2, 16, 16, 3), {0, 20, 50, 60}, {0, 40, 130, 140}, {0, 0, 2}, AttendSupport::blocks()},
      {"unused_slot", geometry(2, 2, 16, 16, 3), {0, 20, 24}, {0, 40, 40}, {}, AttendSupport::full()},
      {"nothing", geometry(2, 2, 16, 16, 3), {0}, {0}, {}, AttendSupport::full()},
      {"bf16", geometry(2, 4, 64, 32, 3), {0, 170}, {0, 170}, {}, AttendSupport::blocks(), DType::kBF16},
  };
}

// A case with random inputs and the forward pass's results.
struct Fixture : msa_test::BackwardFixture {
  Fixture(const Case& c, uint64_t seed) : BackwardFixture(c, seed) {
    const MsaGeometry& g = c.geometry;
    const int64_t T = batch.num_queries, S = c.cu_k.back();
    in.q_THD = normal(c.dtype, {T, g.heads(), g.head_dim});
    in.k_SRD = normal(c.dtype, {S, g.groups, g.head_dim});
    in.v_SRD = normal(c.dtype, {S, g.groups, g.head_dim});
    in.do_THD = normal(c.dtype, {T, g.heads(), g.head_dim});
    in.dlse_TH = normal(DType::kF32, {T, g.heads()});
    in.o_THD = arena.alloc("o", DType::kF32, {T, g.heads(), g.head_dim});
    in.lse_TH = arena.alloc("lse", DType::kF32, {T, g.heads()});
    if (c.support.kind == AttendSupport::Kind::kBlocks) {
      in.lists = arena.alloc("ids", DType::kI32, {g.groups, T, g.topk});
      index_select_ref(g, batch, {}, normal(c.dtype, {T, g.groups, g.index_dim}), normal(c.dtype, {S, g.index_dim}),
                       in.lists, {});
    } else if (c.support.kind == AttendSupport::Kind::kTokens) {
      in.lists = random_tokens(c.support.budget);
    }
    attend_ref(g, batch, c.support, in.q_THD, in.k_SRD, in.v_SRD, in.lists, in.o_THD, in.lse_TH);
  }

  // Distinct positions <= p, in random order.
  Tensor random_tokens(int64_t budget) {
    const Tensor t = arena.alloc("tokens", DType::kI32, {batch.num_queries, budget});
    for (int n = 0; n < batch.num_seqs; ++n) {
      for (int64_t i = 0; i < batch.q_len(n); ++i) {
        std::vector<int32_t> visible(batch.first_position(n) + i + 1);
        for (size_t j = 0; j < visible.size(); ++j) visible[j] = static_cast<int32_t>(j);
        for (size_t j = visible.size(); j > 1; --j) std::swap(visible[j - 1], visible[rng.below(j)]);
        for (int64_t s = 0; s < budget; ++s) {
          t.ptr<int32_t>()[(batch.q_begin(n) + i) * budget + s] =
              s < static_cast<int64_t>(visible.size()) ? visible[s] : -1;
        }
      }
    }
    return t;
  }

  struct Gradients {
    Tensor dq, dk, dv;
  };
  Gradients outputs() { return {poisoned(in.q_THD.shape()), poisoned(in.k_SRD.shape()), poisoned(in.v_SRD.shape())}; }
  Gradients reference() {
    Gradients d = outputs();
    attend_backward_ref(test.geometry, batch, test.support, in, d.dq, d.dk, d.dv);
    return d;
  }
  Gradients fast() {
    Gradients d = outputs();
    const auto plan = attend_backward_plan(test.geometry, batch, test.support);
    attend_backward(plan, batch, in, d.dq, d.dk, d.dv, workspace(plan.workspace_bytes));
    return d;
  }

  AttendBackwardInputs in;
};

class AttendBackward : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, AttendBackward, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// fp32 arithmetic: msa.md §14 gives 2e-5 as the largest error. bf16 inputs are widened exactly, so the same line holds.
TEST_P(AttendBackward, fast_path_equals_the_reference_on_every_instruction_set) {
  SCOPED_TRACE(testing::Message() << "seed " << fresh_seed());
  Fixture f(GetParam(), fresh_seed());
  const auto want = f.reference();
  const CpuIsa best = cpu_isa_detected();
  for (int isa = 0; isa <= static_cast<int>(best); ++isa) {
    cpu_isa_override(static_cast<CpuIsa>(isa));
    SCOPED_TRACE(cpu_isa_name(static_cast<CpuIsa>(isa)));
    const auto got = f.fast();
    EXPECT_LE(max_row_error(got.dq, want.dq), 2e-5);
    EXPECT_LE(max_row_error(got.dk, want.dk), 2e-5);
    EXPECT_LE(max_row_error(got.dv, want.dv), 2e-5);
  }
  cpu_isa_override(best);
}

TEST_P(AttendBackward, T51_results_do_not_depend_on_the_number_of_threads) {
  Fixture f(GetParam(), fresh_seed());
  const int threads = num_threads();
  set_num_threads(1);
  const auto one = f.fast();
  set_num_threads(3);
  const auto three = f.fast();
  set_num_threads(threads);
  for (const auto& [a, b] : {std::pair{one.dq, three.dq}, {one.dk, three.dk}, {one.dv, three.dv}}) {
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.bytes()), 0);
  }
}

// T40: sum(O dO) + sum(LSE dLSE) by central differences in fp64 on a forward pass written for this test.
double loss(const Fixture& f, const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v) {
  const MsaGeometry& g = f.test.geometry;
  const int D = g.head_dim, H = g.heads(), R = g.groups;
  double total = 0;
  for (int n = 0; n < f.batch.num_seqs; ++n) {
    for (int64_t i = 0; i < f.batch.q_len(n); ++i) {
      const int64_t t = f.batch.q_begin(n) + i, p = f.batch.first_position(n) + i;
      for (int h = 0; h < H; ++h) {
        const int r = h / g.heads_per_group;
        double sum = 0;
        std::vector<double> out(D);
        for (int64_t j = 0; j <= p; ++j) {
          bool seen = false;
          for (int s = 0; s < g.topk; ++s) {
            seen = seen || f.in.lists.ptr<int32_t>()[(r * f.batch.num_queries + t) * g.topk + s] == j / g.block;
          }
          if (!seen) continue;
          const int64_t key = ((f.batch.k_begin(n) + j) * R + r) * D;
          double a = 0;
          for (int c = 0; c < D; ++c) a += q[(t * H + h) * D + c] * k[key + c];
          const double e = std::exp(a / std::sqrt(D));
          sum += e;
          for (int c = 0; c < D; ++c) out[c] += e * v[key + c];
        }
        for (int c = 0; c < D; ++c) total += out[c] / sum * f.in.do_THD.ptr<float>()[(t * H + h) * D + c];
        total += std::log(sum) * f.in.dlse_TH.ptr<float>()[t * H + h];
      }
    }
  }
  return total;
}

TEST(AttendBackwardReference, T40_equals_finite_differences) {
  const Case c{"small", geometry(2, 2, 4, 4, 2), {0, 9, 12}, {0, 9, 16}, {}, AttendSupport::blocks()};
  Fixture f(c, fresh_seed());
  SCOPED_TRACE(testing::Message() << "seed " << fresh_seed());
  const auto got = f.reference();
  std::vector<double> x[3];
  const Tensor inputs[3] = {f.in.q_THD, f.in.k_SRD, f.in.v_SRD}, gradients[3] = {got.dq, got.dk, got.dv};
  for (int a = 0; a < 3; ++a) x[a].assign(inputs[a].ptr<float>(), inputs[a].ptr<float>() + inputs[a].numel());
  constexpr double kStep = 1e-5;  // truncation 1e-10, cancellation 1e-11 / 1e-5
  for (int a = 0; a < 3; ++a) {
    for (size_t i = 0; i < x[a].size(); ++i) {
      const double at = x[a][i];
      x[a][i] = at + kStep;
      const double up = loss(f, x[0], x[1], x[2]);
      x[a][i] = at - kStep;
      const double down = loss(f, x[0], x[1], x[2]);
      x[a][i] = at;
      // O and LSE reach the backward as fp32: 1e-6 of values of order 1
      ASSERT_NEAR(gradients[a].ptr<float>()[i], (up - down) / (2 * kStep), 2e-5) << "input " << a << " element " << i;
    }
  }
}

TEST(AttendBackwardReference, T42_gradients_beyond_the_range_of_fp16_are_right) {
  Case c{"large", geometry(1, 2, 16, 16, 2), {0, 40}, {0, 40}, {}, AttendSupport::blocks()};
  Fixture f(c, fresh_seed());
  for (int64_t i = 0; i < f.in.do_THD.numel(); ++i) f.in.do_THD.ptr<float>()[i] *= 1e7f;
  const auto want = f.reference(), got = f.fast();
  float largest = 0;
  for (int64_t i = 0; i < want.dq.numel(); ++i) largest = std::max(largest, std::abs(want.dq.ptr<float>()[i]));
  EXPECT_GT(largest, 65504.0f);
  EXPECT_LE(max_row_error(got.dq, want.dq), 2e-5);
}

TEST(AttendBackwardReference, T39_a_block_that_nobody_chose_gets_zeros) {
  Case c{"chosen", geometry(1, 1, 16, 16, 1), {0, 16}, {0, 80}, {}, AttendSupport::blocks()};
  Fixture f(c, fresh_seed());  // one slot, taken by the own block: blocks 0 .. 3 have no reader
  const auto got = f.fast();
  for (int64_t i = 0; i < 64 * 16; ++i) {
    ASSERT_EQ(got.dk.ptr<float>()[i], 0.0f);
    ASSERT_EQ(got.dv.ptr<float>()[i], 0.0f);
  }
  EXPECT_NE(got.dv.ptr<float>()[64 * 16], 0.0f);
}

TEST(AttendBackwardPlan, T46_a_stale_plan_is_refused) {
  Case c{"stale", geometry(1, 1, 16, 16, 1), {0, 16}, {0, 16}, {}, AttendSupport::full()};
  Fixture f(c, 1);
  const std::vector<int32_t> shorter = {0, 15};
  MsaBatch other = f.batch;
  other.num_queries = 15;
  other.cu_q = other.cu_k = shorter.data();
  const auto plan = attend_backward_plan(c.geometry, other, c.support);
  auto d = f.outputs();
  EXPECT_THROW(attend_backward(plan, f.batch, f.in, d.dq, d.dk, d.dv, nullptr), Error);
}

}  // namespace
}  // namespace m3
