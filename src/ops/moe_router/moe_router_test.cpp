#include "ops/moe_router/moe_router.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

Arena& scratch() {
  static Arena arena("test", 1 << 20);
  return arena;
}

TEST(MoeRouter, equals_the_reference) {
  testing::for_each_isa([] {
    for (auto [T, E, K, C] : {std::array<int64_t, 4>{0, 8, 2, 16},
                              {1, 128, 4, 300},
                              {7, 16, 4, 128},
                              {130, 5, 5, 33},
                              {129, 1, 1, 7}}) {
      for (DType type : {DType::kF32, DType::kBF16}) {
        const Host h = random(type, {T, C}, 1), gate = random(type, {E, C}, 2, 0.1),
                   bias = random(DType::kF32, {E}, 3, 0.2);
        const Host scores(DType::kF32, {T, E}), ids(DType::kI32, {T, K}),
            weights(DType::kF32, {T, K});
        const Host scores_ref(DType::kF32, {T, E}), ids_ref(DType::kI32, {T, K}),
            weights_ref(DType::kF64, {T, K});
        moe_router(h, gate, bias, scores, ids, weights, scratch());
        moe_router_ref(h, gate, bias, scores_ref, ids_ref, weights_ref);
        ASSERT_TRUE(close(scores, scores_ref, 1e-6));
        ASSERT_TRUE(close(ids, ids_ref, 0))
            << "a seed without near-ties must give the same experts";
        ASSERT_TRUE(close(weights, weights_ref, 1e-6));
      }
    }
  });
}

// model.md §17.5
TEST(MoeRouter, the_bias_changes_the_choice_but_not_the_weights) {
  const float scores[4] = {0.9f, 0.5f, 0.3f, 0.1f}, none[4] = {0, 0, 0, 0}, bias[4] = {0, 0, 0, 1};
  int32_t ids[2];
  float weights[2];
  moe_choose(scores, none, 4, 2, ids, weights);
  EXPECT_EQ(ids[0], 0);
  EXPECT_EQ(ids[1], 1);
  EXPECT_FLOAT_EQ(weights[0], 0.9f / 1.4f);
  moe_choose(scores, bias, 4, 2, ids, weights);
  EXPECT_EQ(ids[0], 0);
  EXPECT_EQ(ids[1], 3);
  EXPECT_FLOAT_EQ(weights[0], 0.9f / 1.0f);
  EXPECT_FLOAT_EQ(weights[1], 0.1f / 1.0f);
}

TEST(MoeRouter, ties_go_to_the_lower_ids) {
  const float scores[6] = {0.2f, 0.5f, 0.5f, 0.7f, 0.5f, 0.5f}, none[6] = {};
  int32_t ids[3];
  float weights[3];
  moe_choose(scores, none, 6, 3, ids, weights);
  EXPECT_EQ(ids[0], 1);
  EXPECT_EQ(ids[1], 2);
  EXPECT_EQ(ids[2], 3);
}

TEST(MoeRouter, nan_and_vanished_scores_still_give_distinct_experts) {
  const float none[4] = {}, with_nan[4] = {NAN, 0.1f, NAN, NAN}, zeros[4] = {};
  int32_t ids[2];
  float weights[2];
  moe_choose(with_nan, none, 4, 2, ids, weights);
  EXPECT_EQ(ids[0], 0);
  EXPECT_EQ(ids[1], 1);
  moe_choose(zeros, none, 4, 2, ids, weights);
  EXPECT_EQ(ids[0], 0);
  EXPECT_EQ(ids[1], 1);
  EXPECT_EQ(weights[0], 0.5f);
  EXPECT_EQ(weights[1], 0.5f);
}

TEST(MoeRouter, rows_do_not_depend_on_the_batch) {
  testing::for_each_isa([] {
    const int64_t T = 200, E = 16, K = 4, C = 96;
    const Host h = random(DType::kBF16, {T, C}, 1), gate = random(DType::kF32, {E, C}, 2, 0.1),
               bias(DType::kF32, {E});
    const Host scores(DType::kF32, {T, E}), ids(DType::kI32, {T, K}), weights(DType::kF32, {T, K});
    const Host scores1(DType::kF32, {1, E}), ids1(DType::kI32, {1, K}),
        weights1(DType::kF32, {1, K});
    moe_router(h, gate, bias, scores, ids, weights, scratch());
    for (int64_t t : {0, 13, 199}) {
      moe_router((*h).rows(t, t + 1), gate, bias, scores1, ids1, weights1, scratch());
      EXPECT_TRUE(testing::same_bits(ids1, (*ids).rows(t, t + 1)));
      EXPECT_TRUE(testing::same_bits(weights1, (*weights).rows(t, t + 1)));
    }
  });
}

TEST(MoeRouter, more_experts_than_exist_are_refused) {
  const Host h(DType::kF32, {1, 4}), gate(DType::kF32, {2, 4}), bias(DType::kF32, {2}),
      scores(DType::kF32, {1, 2});
  const Host ids(DType::kI32, {1, 3}), weights(DType::kF32, {1, 3});
  EXPECT_THROW(moe_router(h, gate, bias, scores, ids, weights, scratch()), Error);
}

// The choice is held fixed: weights from the scores of the given experts.
TEST(MoeRouterBackward, the_reference_is_the_gradient) {
  const int64_t T = 3, E = 5, K = 2, C = 4;
  const Host h = random(DType::kF64, {T, C}, 1), gate = random(DType::kF64, {E, C}, 2),
             ids(DType::kI32, {T, K});
  const int32_t chosen[] = {0, 3, 1, 2, 3, 4};
  std::copy(chosen, chosen + 6, ids.ptr<int32_t>());
  const Host dweights = random(DType::kF64, {T, K}, 3), dscores = random(DType::kF64, {T, E}, 4);
  const Host scores(DType::kF64, {T, E}), weights(DType::kF64, {T, K});
  const auto loss = [&] {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t e = 0; e < E; ++e) {
        double r = 0;
        for (int64_t c = 0; c < C; ++c) r += h.at(t * C + c) * gate.at(e * C + c);
        scores.ptr<double>()[t * E + e] = 1 / (1 + std::exp(-r));
      }
      const double a = scores.at(t * E + chosen[t * K]), b = scores.at(t * E + chosen[t * K + 1]);
      weights.ptr<double>()[t * K] = a / (a + b);
      weights.ptr<double>()[t * K + 1] = b / (a + b);
    }
    return testing::dot(dweights, weights) + testing::dot(dscores, scores);
  };
  loss();
  const Host dh(DType::kF64, {T, C}), dgate(DType::kF64, {E, C});
  moe_router_backward_ref(h, gate, scores, ids, weights, dweights, dscores, dh, dgate);
  EXPECT_TRUE(close(dh, testing::numeric_gradient(h, loss), 1e-8));
  EXPECT_TRUE(close(dgate, testing::numeric_gradient(gate, loss), 1e-8));
}

TEST(MoeRouterBackward, equals_the_reference) {
  testing::for_each_isa([] {
    for (auto [T, E, K, C] : {std::array<int64_t, 4>{0, 8, 2, 16},
                              {1, 128, 4, 300},
                              {130, 16, 4, 33},
                              {129, 2, 1, 7}}) {
      for (DType type : {DType::kF32, DType::kBF16}) {
        for (bool with_scores : {false, true}) {
          const Host h = random(type, {T, C}, 1), gate = random(type, {E, C}, 2, 0.1),
                     bias(DType::kF32, {E});
          const Host scores(DType::kF32, {T, E}), ids(DType::kI32, {T, K}),
              weights(DType::kF32, {T, K});
          moe_router(h, gate, bias, scores, ids, weights, scratch());
          const Host dweights = random(DType::kF32, {T, K}, 4),
                     dscores = random(DType::kF32, {T, E}, 5);
          const Host dh = random(DType::kF32, {T, C}, 6), dgate = random(DType::kF32, {E, C}, 7);
          const Host dh_want = testing::copy_as(DType::kF64, dh),
                     dgate_want = testing::copy_as(DType::kF64, dgate);
          const Tensor extra = with_scores ? *dscores : Tensor();
          moe_router_backward(h, gate, scores, ids, weights, dweights, extra, dh, dgate, scratch());
          moe_router_backward_ref(h, gate, scores, ids, weights, dweights, extra, dh_want,
                                  dgate_want);
          ASSERT_TRUE(close(dh, dh_want, 2e-6));
          ASSERT_TRUE(close(dgate, dgate_want, 2e-6));
        }
      }
    }
  });
}

TEST(MoeBalance, the_bias_moves_against_the_load) {
  const Host ids(DType::kI32, {4, 2}), counts(DType::kI64, {4}), bias(DType::kF32, {4});
  const int32_t chosen[] = {0, 1, 0, 2, 0, 1, 0, 2};
  std::copy(chosen, chosen + 8, ids.ptr<int32_t>());
  moe_count(ids, counts);
  moe_balance_step(counts, 0.5f, bias);  // counts 4, 2, 2, 0 with mean 2
  EXPECT_EQ(bias.at(0), -0.5);
  EXPECT_EQ(bias.at(1), 0);
  EXPECT_EQ(bias.at(2), 0);
  EXPECT_EQ(bias.at(3), 0.5);
}

TEST(MoeBalance, the_loss_is_1_when_balanced_and_its_gradient_is_right) {
  const int64_t T = 6, E = 3, K = 1;
  const Host ids(DType::kI32, {T, K}), scores(DType::kF32, {T, E}), dscores(DType::kF32, {T, E}),
      sink(DType::kF32, {T, E});
  for (int64_t t = 0; t < T; ++t) ids.ptr<int32_t>()[t] = static_cast<int32_t>(t % 3);
  for (int64_t i = 0; i < T * E; ++i) scores.ptr<float>()[i] = 0.5f;
  const std::vector<int32_t> one = {0, 6}, two = {0, 2, 6};
  EXPECT_NEAR(moe_balance_loss(scores, ids, one, 0, sink) / T, 1, 1e-6);
  const Host varied = random(DType::kF32, {T, E}, 3, 0.1, 0.5);
  moe_balance_loss(varied, ids, two, 2.0f, dscores);
  for (int64_t i = 0; i < T * E; ++i) {
    float& s = varied.ptr<float>()[i];
    const float saved = s, step = 0x1p-8f;
    s = saved + step;
    const double up = moe_balance_loss(varied, ids, two, 0, sink);
    s = saved - step;
    const double down = moe_balance_loss(varied, ids, two, 0, sink);
    s = saved;
    EXPECT_NEAR(dscores.at(i), 2 * (up - down) / (2 * step), 1e-3) << i;
  }
}

}  // namespace
}  // namespace m3
