// That the reference is the gradient of the KL shows in model/gradient_test.cpp (stage dsa), by
// finite differences in fp64.
#include "ops/dsa_kl/dsa_kl.h"

#include "base/threads.h"
#include "ops/attend/attend.h"
#include "ops/common/testing.h"
#include "ops/dsa_select/dsa_select.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

// 3 groups of 2 heads, 5 index heads, lists of 37 tokens: documents below and above the budget,
// more than one piece.
struct Fixture {
  MsaGeometry geometry{
      .groups = 3, .heads_per_group = 2, .head_dim = 20, .index_dim = 24, .block = 16, .topk = 3};
  std::vector<int32_t> cu = {0, 1, 41, 41, 341};
  const int64_t T = 341, A = 5, budget = 37;
  MsaBatch batch{.num_seqs = 4, .num_queries = T, .cu_q = cu.data(), .cu_k = cu.data()};
  Host q, k, qx, kx, w, tokens{DType::kI32, {T, budget}}, lse{DType::kF32, {T, 6}};

  explicit Fixture(DType type) {
    q = random(type, {T, 6, 20}, 1);
    k = random(type, {T, 3, 20}, 2);
    qx = random(type, {T, A, 24}, 3);
    kx = random(type, {T, 24}, 4);
    w = random(DType::kF32, {T, A}, 5);
    dsa_select_ref({static_cast<int>(A), 24, 16, budget}, batch, qx, kx, w, tokens);
    const Host o(DType::kF32, {T, 6, 20});
    attend_ref(geometry, batch, AttendSupport::tokens(budget), q, k, k, tokens, o, lse);
  }
  struct Outputs {
    Host dqx, dkx, dw, kl;
  };
  Outputs outputs(DType type = DType::kF32) const {
    return {random(type, {T, A, 24}, 9), random(type, {T, 24}, 9), random(type, {T, A}, 9),
            random(type, {T}, 9)};
  }
  Outputs fast(std::span<const uint8_t> takes_part = {}) const {
    Outputs out = outputs();
    const DsaKlPlan plan = dsa_kl_plan(geometry, static_cast<int>(A), budget, batch, takes_part);
    Arena arena("workspace", plan.workspace_bytes + Arena::kAlignment);
    dsa_kl(plan, batch, 0.01, {q, k, lse, qx, kx, w, tokens}, {out.dqx, out.dkx, out.dw, out.kl},
           arena.alloc_bytes("workspace", plan.workspace_bytes));
    return out;
  }
};

TEST(DsaKl, equals_the_reference) {
  testing::for_each_isa([] {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      const Fixture f(type);
      const auto got = f.fast(), want = f.outputs(DType::kF64);
      dsa_kl_ref(f.geometry, f.batch, 0.01, {f.q, f.k, f.lse, f.qx, f.kx, f.w, f.tokens},
                 {want.dqx, want.dkx, want.dw, want.kl});
      // Whole tensors: rows of one token have no gradient but that of rounding.
      EXPECT_TRUE(
          close((*got.dqx).reshape({f.T * f.A * 24}), (*want.dqx).reshape({f.T * f.A * 24}), 2e-6));
      EXPECT_TRUE(close((*got.dkx).reshape({f.T * 24}), (*want.dkx).reshape({f.T * 24}), 2e-6));
      EXPECT_TRUE(close((*got.dw).reshape({f.T * f.A}), (*want.dw).reshape({f.T * f.A}), 2e-6));
      EXPECT_TRUE(close(got.kl, want.kl, 2e-6));
    }
  });
}

TEST(DsaKl, threads_change_no_bit_and_sequences_may_be_left_out) {
  const Fixture f(DType::kF32);
  const int before = num_threads();
  const auto first = f.fast();
  set_num_threads(3);
  const auto again = f.fast();
  const uint8_t takes_part[] = {1, 0, 1, 1};
  const auto part = f.fast(takes_part);
  set_num_threads(before);
  EXPECT_TRUE(testing::same_bits(first.dqx, again.dqx));
  EXPECT_TRUE(testing::same_bits(first.dkx, again.dkx));
  for (int64_t i = 0; i < f.T * 24; ++i) {
    ASSERT_EQ(part.dkx.at(i), i / 24 >= 1 && i / 24 < 41 ? 0 : first.dkx.at(i)) << i;
  }
  for (int64_t t = 0; t < f.T; ++t)
    ASSERT_EQ(part.kl.at(t), t >= 1 && t < 41 ? 0 : first.kl.at(t)) << t;
}

}  // namespace
}  // namespace m3
