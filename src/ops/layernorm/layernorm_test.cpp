#include "ops/layernorm/layernorm.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};
constexpr float kEps = 1e-5f;

TEST(Layernorm, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t T : {0, 1, 3, 129}) {
      for (int64_t C : {1, 7, 80, 127, 128, 129, 1280}) {
        for (DType xt : kTypes) {
          for (DType wt : kTypes) {
            for (DType yt : kTypes) {
              // A mean far from zero: the variance must not be a difference of large squares.
              const Host x = random(xt, {T, C}, 1, 1, 20), w = random(wt, {C}, 2), b = random(wt, {C}, 3);
              const Host y(yt, {T, C}), want(DType::kF64, {T, C});
              layernorm(x, w, b, y, kEps);
              layernorm_ref(x, w, b, want, kEps);
              ASSERT_TRUE(close(y, want, 1e-5 + testing::rounding(yt))) << T << " x " << C;
            }
          }
        }
      }
    }
  });
}

TEST(Layernorm, a_constant_row_gives_the_bias) {
  testing::for_each_isa([] {
    const Host x = random(DType::kF32, {1, 50}, 1, 0, 7), w = random(DType::kF32, {50}, 2), b = random(DType::kF32, {50}, 3);
    const Host y(DType::kF32, {1, 50});
    layernorm(x, w, b, y, kEps);
    for (int i = 0; i < 50; ++i) EXPECT_NEAR(y.at(i), b.at(i), 1e-3);
  });
}

TEST(Layernorm, works_in_place) {
  testing::for_each_isa([] {
    const Host x = random(DType::kBF16, {5, 100}, 1), w = random(DType::kF32, {100}, 2), b = random(DType::kF32, {100}, 3);
    const Host y(DType::kBF16, {5, 100});
    layernorm(x, w, b, y, kEps);
    layernorm(x, w, b, x, kEps);
    EXPECT_TRUE(testing::same_bits(x, y));
  });
}

}  // namespace
}  // namespace m3
