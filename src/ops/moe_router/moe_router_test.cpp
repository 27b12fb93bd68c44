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
    for (auto [T, E, K, C] : {std::array<int64_t, 4>{0, 8, 2, 16}, {1, 128, 4, 300}, {7, 16, 4, 128}, {130, 5, 5, 33},
                              {129, 1, 1, 7}}) {
      for (DType type : {DType::kF32, DType::kBF16}) {
        const Host h = random(type, {T, C}, 1), gate = random(type, {E, C}, 2, 0.1), bias = random(DType::kF32, {E}, 3, 0.2);
        const Host scores(DType::kF32, {T, E}), ids(DType::kI32, {T, K}), weights(DType::kF32, {T, K});
        const Host scores_ref(DType::kF32, {T, E}), ids_ref(DType::kI32, {T, K}), weights_ref(DType::kF64, {T, K});
        moe_router(h, gate, bias, scores, ids, weights, scratch());
        moe_router_ref(h, gate, bias, scores_ref, ids_ref, weights_ref);
        ASSERT_TRUE(close(scores, scores_ref, 1e-6));
        ASSERT_TRUE(close(ids, ids_ref, 0)) << "a seed without near-ties must give the same experts";
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
    const Host h = random(DType::kBF16, {T, C}, 1), gate = random(DType::kF32, {E, C}, 2, 0.1), bias(DType::kF32, {E});
    const Host scores(DType::kF32, {T, E}), ids(DType::kI32, {T, K}), weights(DType::kF32, {T, K});
    const Host scores1(DType::kF32, {1, E}), ids1(DType::kI32, {1, K}), weights1(DType::kF32, {1, K});
    moe_router(h, gate, bias, scores, ids, weights, scratch());
    for (int64_t t : {0, 13, 199}) {
      moe_router((*h).rows(t, t + 1), gate, bias, scores1, ids1, weights1, scratch());
      EXPECT_TRUE(testing::same_bits(ids1, (*ids).rows(t, t + 1)));
      EXPECT_TRUE(testing::same_bits(weights1, (*weights).rows(t, t + 1)));
    }
  });
}

TEST(MoeRouter, more_experts_than_exist_are_refused) {
  const Host h(DType::kF32, {1, 4}), gate(DType::kF32, {2, 4}), bias(DType::kF32, {2}), scores(DType::kF32, {1, 2});
  const Host ids(DType::kI32, {1, 3}), weights(DType::kF32, {1, 3});
  EXPECT_THROW(moe_router(h, gate, bias, scores, ids, weights, scratch()), Error);
}

}  // namespace
}  // namespace m3
