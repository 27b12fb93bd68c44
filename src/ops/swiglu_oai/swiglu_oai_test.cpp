#include "ops/swiglu_oai/swiglu_oai.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};

TEST(SwigluOai, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t T : {0, 1, 3}) {
      for (int64_t F : {1, 7, 127, 128, 129, 6000}) {
        for (DType xt : kTypes) {
          for (DType at : kTypes) {
            const Host gate = random(xt, {T, F}, 1, 4), up = random(xt, {T, F}, 2, 4);  // both clamps are met
            const Host a(at, {T, F}), want(DType::kF64, {T, F});
            const SwigluOai config = {.alpha = 1.5f, .limit = 6.0f, .beta = 0.75f};
            swiglu_oai(gate, up, config, a);
            swiglu_oai_ref(gate, up, config, want);
            ASSERT_TRUE(close(a, want, 1e-6 + testing::rounding(at))) << T << " x " << F;
          }
        }
      }
    }
  });
}

// model.md §17.6
TEST(SwigluOai, clamps_as_documented) {
  testing::for_each_isa([] {
    const auto one = [](float g, float u) {
      const Host gate(DType::kF32, {1, 1}), up(DType::kF32, {1, 1}), a(DType::kF32, {1, 1});
      gate.ptr<float>()[0] = g;
      up.ptr<float>()[0] = u;
      swiglu_oai(gate, up, {}, a);
      return a.ptr<float>()[0];
    };
    EXPECT_EQ(one(100, 3), one(7, 3));
    EXPECT_EQ(one(1, 100), one(1, 7));
    EXPECT_EQ(one(1, -100), one(1, -7));
    EXPECT_NE(one(-8, 1), one(-7, 1));     // no lower clamp of the gate
    EXPECT_NEAR(one(-100, 1), 0, 1e-30);   // and no overflow far below
    EXPECT_EQ(one(3, -1), 0);
    EXPECT_NEAR(one(2, 0.5), 1.5 * 2 / (1 + std::exp(-1.702 * 2)), 1e-6);
    EXPECT_TRUE(std::isnan(one(NAN, 1)));
    EXPECT_TRUE(std::isnan(one(1, NAN)));
  });
}

TEST(SwigluOai, works_in_place) {
  testing::for_each_isa([] {
    const Host gate = random(DType::kBF16, {5, 77}, 1), up = random(DType::kBF16, {5, 77}, 2), a(DType::kBF16, {5, 77});
    swiglu_oai(gate, up, {}, a);
    swiglu_oai(gate, up, {}, gate);
    EXPECT_TRUE(testing::same_bits(a, gate));
  });
}

TEST(SwigluOaiBackward, the_reference_is_the_gradient) {
  const Host gate = random(DType::kF64, {4, 9}, 1, 4), up = random(DType::kF64, {4, 9}, 2, 4), da = random(DType::kF64, {4, 9}, 3);
  const Host a(DType::kF64, {4, 9}), dgate(DType::kF64, {4, 9}), dup(DType::kF64, {4, 9});
  const SwigluOai config = {.alpha = 1.5f, .limit = 3.0f, .beta = 0.75f};
  const auto loss = [&] {
    swiglu_oai_ref(gate, up, config, a);
    return testing::dot(da, a);
  };
  swiglu_oai_backward_ref(gate, up, config, da, dgate, dup);
  EXPECT_TRUE(close(dgate, testing::numeric_gradient(gate, loss), 1e-8));
  EXPECT_TRUE(close(dup, testing::numeric_gradient(up, loss), 1e-8));
}

TEST(SwigluOaiBackward, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t F : {0, 1, 7, 127, 128, 6001}) {
      for (DType xt : kTypes) {
        for (DType gt : kTypes) {
          const Host gate = random(xt, {1, F}, 1, 4), up = random(xt, {1, F}, 2, 4), da = random(gt, {1, F}, 3);
          const Host dgate(gt, {1, F}), dup(gt, {1, F}), dgate_want(DType::kF64, {1, F}), dup_want(DType::kF64, {1, F});
          swiglu_oai_backward(gate, up, {}, da, dgate, dup);
          swiglu_oai_backward_ref(gate, up, {}, da, dgate_want, dup_want);
          ASSERT_TRUE(close(dgate, dgate_want, 2e-6 + testing::rounding(gt))) << F;
          ASSERT_TRUE(close(dup, dup_want, 2e-6 + testing::rounding(gt))) << F;
        }
      }
    }
  });
}

TEST(SwigluOaiBackward, at_the_limit_the_gradient_passes_and_beyond_it_does_not) {
  testing::for_each_isa([] {
    const Host gate(DType::kF32, {4}), up(DType::kF32, {4}), da(DType::kF32, {4}), dgate(DType::kF32, {4}), dup(DType::kF32, {4});
    const float in[] = {7.0f, 7.01f, -7.0f, -7.01f};
    for (int i = 0; i < 4; ++i) {
      gate.ptr<float>()[i] = up.ptr<float>()[i] = in[i];
      da.ptr<float>()[i] = 1;
    }
    swiglu_oai_backward(gate, up, {}, da, dgate, dup);
    EXPECT_NE(dgate.at(0), 0);
    EXPECT_EQ(dgate.at(1), 0);
    EXPECT_NE(dgate.at(3), 0);
    EXPECT_NE(dup.at(0), 0);
    EXPECT_EQ(dup.at(1), 0);
    EXPECT_NE(dup.at(2), 0);
    EXPECT_EQ(dup.at(3), 0);
  });
}

}  // namespace
}  // namespace m3
