#include "ops/moe_experts/moe_experts.h"

#include "base/threads.h"
#include "ops/common/testing.h"
#include "ops/moe_experts/moe_groups.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

Arena& scratch() {
  static Arena arena("test", 32 << 20);
  return arena;
}

struct Experts {
  std::vector<Host> memory;
  std::vector<ExpertWeights> weights;

  Experts(int64_t count, int64_t C, int64_t F, DType type, uint64_t seed) {
    memory.reserve(3 * count);
    const auto matrix = [&](int64_t out, int64_t in) -> Weight {
      memory.push_back(
          random(type, {out, in}, seed + memory.size(), 1 / std::sqrt(static_cast<double>(in))));
      return *memory.back();
    };
    for (int64_t e = 0; e < count; ++e)
      weights.push_back({matrix(F, C), matrix(F, C), matrix(C, F)});
  }
};

// K distinct experts a token, or all tokens to expert `all` if it is not negative; weights that sum to 1.
struct Routing {
  Host ids, weights;
  Routing(int64_t T, int64_t E, int64_t K, int32_t all = -1)
      : ids(DType::kI32, {T, K}), weights(DType::kF32, {T, K}) {
    Philox rng(77);
    for (int64_t t = 0; t < T; ++t) {
      const int32_t first = static_cast<int32_t>(rng.below(E));
      for (int64_t j = 0; j < K; ++j) {
        ids.ptr<int32_t>()[t * K + j] = all >= 0 ? all : static_cast<int32_t>((first + j) % E);
        weights.ptr<float>()[t * K + j] = static_cast<float>(0.1 + rng.uniform());
      }
    }
  }
};

constexpr SwigluOai kSwiglu = {.alpha = 1.702f, .limit = 1.0f, .beta = 1.0f};  // the clamps are met

TEST(MoeExperts, equals_the_reference) {
  testing::for_each_isa([] {
    const int64_t E = 6, K = 3, C = 40, F = 24;
    for (int64_t T : {0, 1, 2, 33, 129}) {
      for (DType ht : {DType::kF32, DType::kBF16}) {
        for (DType wt : {DType::kF32, DType::kBF16}) {
          const Experts routed(E, C, F, wt, 10), shared(1, C, 2 * F, wt, 50);
          const Routing routing(T, E, K);
          const Host h = random(ht, {T, C}, 1), y(ht, {T, C}), want(DType::kF64, {T, C});
          const MoeExperts experts = {routed.weights, &shared.weights[0], 2.0f, kSwiglu};
          moe_experts(h, routing.ids, routing.weights, experts, y, scratch());
          moe_experts_ref(h, routing.ids, routing.weights, experts, want);
          // In bf16 the activation is rounded as well as the result.
          ASSERT_TRUE(close(y, want, ht == DType::kF32 ? 2e-6 : 6e-3)) << "T = " << T;
        }
      }
    }
  });
}

TEST(MoeExperts, all_tokens_at_one_expert_and_none_at_the_others) {
  testing::for_each_isa([] {
    const int64_t T = 70, E = 4, C = 16, F = 9;
    const Experts routed(E, C, F, DType::kF32, 10);
    const Routing routing(T, E, 1, 2);
    const Host h = random(DType::kF32, {T, C}, 1), y(DType::kF32, {T, C}),
               want(DType::kF64, {T, C});
    const MoeExperts experts = {routed.weights, nullptr, 1.0f, kSwiglu};
    moe_experts(h, routing.ids, routing.weights, experts, y, scratch());
    moe_experts_ref(h, routing.ids, routing.weights, experts, want);
    EXPECT_TRUE(close(y, want, 2e-6));
  });
}

TEST(MoeExperts, without_routed_experts_it_is_the_dense_mlp) {
  testing::for_each_isa([] {
    const int64_t T = 5, C = 33, F = 70;
    const Experts dense(1, C, F, DType::kBF16, 3);
    const Host h = random(DType::kF32, {T, C}, 1), y(DType::kF32, {T, C});
    const Host gate(DType::kF32, {T, F}), up(DType::kF32, {T, F}), want(DType::kF32, {T, C});
    moe_experts(h, {}, {}, {.shared = &dense.weights[0], .routed_scale = 2.0f, .swiglu = kSwiglu},
                y, scratch());
    gemm(h, dense.weights[0].gate_FC, {}, gate, {}, scratch());
    gemm(h, dense.weights[0].up_FC, {}, up, {}, scratch());
    swiglu_oai(gate, up, kSwiglu, gate);
    gemm(gate, dense.weights[0].down_CF, {}, want, {}, scratch());
    EXPECT_TRUE(testing::same_bits(y, want));
  });
}

TEST(MoeExperts, rows_do_not_depend_on_the_batch) {
  testing::for_each_isa([] {
    const int64_t T = 150, E = 5, K = 2, C = 64, F = 48;
    for (DType type : {DType::kF32, DType::kBF16}) {
      const Experts routed(E, C, F, DType::kBF16, 10), shared(1, C, F, DType::kBF16, 50);
      const Routing routing(T, E, K);
      const Host h = random(type, {T, C}, 1), all(type, {T, C}), part(type, {T, C});
      const MoeExperts experts = {routed.weights, &shared.weights[0], 2.0f, kSwiglu};
      moe_experts(h, routing.ids, routing.weights, experts, all, scratch());
      for (auto [begin, end] : {std::array<int64_t, 2>{0, 1}, {149, 150}, {3, 12}, {20, 149}}) {
        const auto rows = [&](const Tensor& t) { return t.rows(begin, end); };
        moe_experts(rows(h), rows(routing.ids), rows(routing.weights), experts, rows(part),
                    scratch());
        EXPECT_TRUE(testing::same_bits(rows(part), rows(all))) << begin << " to " << end;
      }
    }
  });
}

TEST(MoeExperts, groups_are_stable_by_token) {
  const Host ids(DType::kI32, {3, 2});
  const int32_t chosen[6] = {1, 0, 3, 1, 0, 1};
  std::copy(chosen, chosen + 6, ids.ptr<int32_t>());
  const MoeGroups groups = moe_group(ids, 4);
  EXPECT_EQ(groups.begin, (std::vector<int64_t>{0, 2, 5, 5, 6}));
  EXPECT_EQ(groups.token, (std::vector<int32_t>{0, 2, 0, 1, 2, 1}));
  EXPECT_EQ(groups.row, (std::vector<int32_t>{2, 0, 5, 3, 1, 4}));
}

TEST(MoeExperts, the_planned_scratch_is_enough_and_nearly_all_used) {
  const int64_t T = 100, E = 4, K = 2, C = 64, F = 48;
  const Experts routed(E, C, F, DType::kBF16, 10), shared(1, C, F, DType::kBF16, 50);
  const Routing routing(T, E, K);
  const Host h = random(DType::kBF16, {T, C}, 1), y(DType::kBF16, {T, C});
  Arena arena("planned", moe_experts_scratch_bytes(T, K, C, F, F));
  moe_experts(h, routing.ids, routing.weights, {routed.weights, &shared.weights[0], 2.0f, kSwiglu},
              y, arena);
  EXPECT_GT(arena.peak_bytes(), arena.capacity_bytes() * 9 / 10);
  EXPECT_EQ(arena.used_bytes(), 0);
}

TEST(MoeExperts, an_id_that_is_no_expert_is_named) {
  const Experts routed(2, 8, 4, DType::kF32, 10);
  const Routing routing(3, 2, 1, 2);
  const Host h(DType::kF32, {3, 8}), y(DType::kF32, {3, 8});
  try {
    moe_experts(h, routing.ids, routing.weights, {.routed = routed.weights}, y, scratch());
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "ids_TK[0, 0] is 2, want 0 to 1");
  }
}

struct Gradients {
  std::vector<Host> memory;
  std::vector<ExpertGradients> list;
  Gradients(const std::vector<ExpertWeights>& weights, DType type) {
    memory.reserve(3 * weights.size());
    const auto zeros = [&](const Weight& w) -> Tensor {
      memory.emplace_back(type, w.values.shape());
      return memory.back();
    };
    for (const ExpertWeights& w : weights)
      list.push_back({zeros(w.gate_FC), zeros(w.up_FC), zeros(w.down_CF)});
  }
};

TEST(MoeExpertsBackward, the_reference_is_the_gradient) {
  const int64_t T = 3, E = 3, K = 2, C = 4, F = 3;
  const Experts routed(E, C, F, DType::kF64, 10), shared(1, C, F + 1, DType::kF64, 50);
  const Routing routing(T, E, K);
  const Host weights = testing::copy_as(DType::kF64, routing.weights);
  const Host h = random(DType::kF64, {T, C}, 1), dy = random(DType::kF64, {T, C}, 2),
             y(DType::kF64, {T, C});
  const MoeExperts experts = {routed.weights, &shared.weights[0], 2.0f, kSwiglu};
  const auto loss = [&] {
    moe_experts_ref(h, routing.ids, weights, experts, y);
    return testing::dot(dy, y);
  };
  const Host dh(DType::kF64, {T, C}), dweights(DType::kF64, {T, K});
  const Gradients g(routed.weights, DType::kF64), g_shared(shared.weights, DType::kF64);
  moe_experts_backward_ref(h, routing.ids, weights, experts, dy, dh, dweights,
                           {g.list, &g_shared.list[0]});
  EXPECT_TRUE(close(dh, testing::numeric_gradient(h, loss), 1e-7));
  EXPECT_TRUE(close(dweights, testing::numeric_gradient(weights, loss), 1e-7));
  for (size_t i = 0; i < g.memory.size(); ++i) {
    EXPECT_TRUE(close(g.memory[i], testing::numeric_gradient(routed.memory[i], loss), 1e-7)) << i;
  }
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(close(g_shared.memory[i], testing::numeric_gradient(shared.memory[i], loss), 1e-7))
        << i;
  }
}

TEST(MoeExpertsBackward, equals_the_reference) {
  testing::for_each_isa([] {
    const int64_t E = 6, K = 3, C = 40, F = 24;
    for (int64_t T : {0, 1, 33, 129}) {
      for (DType type : {DType::kF32, DType::kBF16}) {
        const Experts routed(E, C, F, type, 10), shared(1, C, 2 * F, type, 50);
        const Routing routing(T, E, K);
        const Host h = random(type, {T, C}, 1), dy = random(type, {T, C}, 2);
        const MoeExperts experts = {routed.weights, &shared.weights[0], 2.0f, kSwiglu};
        const Host dh = random(DType::kF32, {T, C}, 3), dweights(DType::kF32, {T, K});
        const Host dh_want = testing::copy_as(DType::kF64, dh), dweights_want(DType::kF64, {T, K});
        const Gradients g(routed.weights, DType::kF32), g_shared(shared.weights, DType::kF32);
        const Gradients want(routed.weights, DType::kF64), want_shared(shared.weights, DType::kF64);
        moe_experts_backward(h, routing.ids, routing.weights, experts, {}, dy, dh, dweights,
                             {g.list, &g_shared.list[0]}, scratch());
        moe_experts_backward_ref(h, routing.ids, routing.weights, experts, dy, dh_want,
                                 dweights_want, {want.list, &want_shared.list[0]});
        const auto whole = [&](const Host& t) { return (*t).reshape({t->numel()}); };
        const double tolerance = type == DType::kF32 ? 3e-6 : 1e-2;
        ASSERT_TRUE(close(dh, dh_want, tolerance)) << T;
        ASSERT_TRUE(close(whole(dweights), whole(dweights_want), tolerance)) << T;
        for (size_t i = 0; i < g.memory.size(); ++i) {
          ASSERT_TRUE(close(whole(g.memory[i]), whole(want.memory[i]), tolerance)) << T << " " << i;
        }
        for (size_t i = 0; i < 3; ++i) {
          ASSERT_TRUE(close(whole(g_shared.memory[i]), whole(want_shared.memory[i]), tolerance))
              << T << " " << i;
        }
      }
    }
  });
}

// Recompute on and off, one thread and three: the same bits (training.md §14).
TEST(MoeExpertsBackward, saved_products_and_threads_do_not_change_a_bit) {
  testing::for_each_isa([] {
    const int64_t T = 70, E = 4, K = 2, C = 32, F = 24;
    for (DType type : {DType::kF32, DType::kBF16}) {
      const Experts routed(E, C, F, type, 10), shared(1, C, F, type, 50);
      const Routing routing(T, E, K);
      const Host h = random(type, {T, C}, 1), dy = random(DType::kF32, {T, C}, 2), y(type, {T, C}),
                 plain(type, {T, C});
      const MoeExperts experts = {routed.weights, &shared.weights[0], 2.0f, kSwiglu};
      const Host gate(DType::kF32, {T * K, F}), up(DType::kF32, {T * K, F}),
          gate1(DType::kF32, {T, F}), up1(DType::kF32, {T, F});
      const MoeSaved saved = {gate, up, gate1, up1};
      moe_experts_saving(h, routing.ids, routing.weights, experts, y, saved, scratch());
      moe_experts(h, routing.ids, routing.weights, experts, plain, scratch());
      ASSERT_TRUE(testing::same_bits(y, plain));
      std::vector<Host> results[2];
      const int before = num_threads();
      for (int run = 0; run < 2; ++run) {
        set_num_threads(run == 0 ? 1 : 3);
        Gradients g(routed.weights, DType::kF32), g_shared(shared.weights, DType::kF32);
        Host dh(DType::kF32, {T, C}), dweights(DType::kF32, {T, K});
        moe_experts_backward(h, routing.ids, routing.weights, experts,
                             run == 0 ? saved : MoeSaved{}, dy, dh, dweights,
                             {g.list, &g_shared.list[0]}, scratch());
        results[run] = std::move(g.memory);
        for (Host& t : g_shared.memory) results[run].push_back(std::move(t));
        results[run].push_back(std::move(dh));
        results[run].push_back(std::move(dweights));
      }
      set_num_threads(before);
      for (size_t i = 0; i < results[0].size(); ++i)
        EXPECT_TRUE(testing::same_bits(results[0][i], results[1][i])) << i;
    }
  });
}

TEST(MoeExpertsBackward, the_planned_scratch_is_enough) {
  const int64_t T = 100, E = 4, K = 2, C = 64, F = 48;
  const Experts routed(E, C, F, DType::kF32, 10), shared(1, C, F, DType::kF32, 50);
  const Routing routing(T, E, K);
  const Host h = random(DType::kF32, {T, C}, 1), dh(DType::kF32, {T, C}),
             dweights(DType::kF32, {T, K});
  const Gradients g(routed.weights, DType::kF32), g_shared(shared.weights, DType::kF32);
  Arena arena("planned", moe_experts_backward_scratch_bytes(T, K, C, F, F));
  moe_experts_backward(h, routing.ids, routing.weights,
                       {routed.weights, &shared.weights[0], 2.0f, kSwiglu}, {}, h, dh, dweights,
                       {g.list, &g_shared.list[0]}, arena);
  EXPECT_GT(arena.peak_bytes(), arena.capacity_bytes() * 9 / 10);
}

}  // namespace
}  // namespace m3
