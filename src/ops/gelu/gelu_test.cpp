#include "ops/gelu/gelu.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::Host;
using testing::random;

TEST(Gelu, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t n : {0, 1, 7, 127, 128, 129, 5000}) {
      for (DType xt : {DType::kF32, DType::kBF16}) {
        for (DType yt : {DType::kF32, DType::kBF16}) {
          const Host x = random(xt, {n}, 1, 2), y(yt, {n}), want(DType::kF64, {n});
          gelu(x, y);
          gelu_ref(x, want);
          ASSERT_TRUE(testing::close(y, want, 5e-7 + testing::rounding(yt))) << n;
        }
      }
    }
  });
}

// Each value on its own, both tails included: relative 2e-6 down to 1e-30.
TEST(Gelu, keeps_the_relative_accuracy_of_both_tails) {
  testing::for_each_isa([] {
    const int64_t n = 4801;
    const Host x(DType::kF32, {n}), y(DType::kF32, {n}), want(DType::kF64, {n});
    for (int64_t i = 0; i < n; ++i) x.ptr<float>()[i] = static_cast<float>(i - 2400) / 200;
    gelu(x, y);
    gelu_ref(x, want);
    for (int64_t i = 0; i < n; ++i) {
      // e^(-x²/2) magnifies the rounding of x² by x²/2.
      const double limit = std::abs(want.at(i)) * (5e-7 + 6e-8 * x.at(i) * x.at(i)) + 1e-30;
      ASSERT_NEAR(y.at(i), want.at(i), limit) << "x = " << x.at(i);
    }
  });
}

TEST(Gelu, extremes) {
  testing::for_each_isa([] {
    const Host x(DType::kF32, {9}), y(DType::kF32, {9});
    const float in[] = {-INFINITY, -1e30f, -50, -0.0f, 0, 50, 1e30f, INFINITY, NAN};
    std::copy(in, in + 9, x.ptr<float>());
    gelu(x, y);
    EXPECT_EQ(y.at(2), 0);
    EXPECT_EQ(y.at(3), 0);
    EXPECT_EQ(y.at(4), 0);
    EXPECT_EQ(y.at(5), 50);
    EXPECT_EQ(y.at(6), 1e30f);
    EXPECT_TRUE(std::isnan(y.at(8)));
  });
}

TEST(GeluBackward, the_reference_is_the_gradient) {
  const Host x = random(DType::kF64, {40}, 1, 2), dy = random(DType::kF64, {40}, 2),
             y(DType::kF64, {40}), dx(DType::kF64, {40});
  gelu_backward_ref(x, dy, dx);
  EXPECT_TRUE(testing::close(dx,
                             testing::numeric_gradient(x,
                                                       [&] {
                                                         gelu_ref(x, y);
                                                         return testing::dot(dy, y);
                                                       }),
                             1e-8));
}

TEST(GeluBackward, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t n : {0, 1, 7, 127, 128, 129, 6000}) {
      for (DType xt : {DType::kF32, DType::kBF16}) {
        for (DType gt : {DType::kF32, DType::kBF16}) {
          const Host x = random(xt, {n}, 1, 2), dy = random(gt, {n}, 2), dx(gt, {n}),
                     want(DType::kF64, {n});
          gelu_backward(x, dy, dx);
          gelu_backward_ref(x, dy, want);
          ASSERT_TRUE(testing::close(dx, want, 1e-6 + testing::rounding(gt))) << n;
        }
      }
    }
  });
}

}  // namespace
}  // namespace m3
