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
              const Host x = random(xt, {T, C}, 1, 1, 20), w = random(wt, {C}, 2),
                         b = random(wt, {C}, 3);
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
    const Host x = random(DType::kF32, {1, 50}, 1, 0, 7), w = random(DType::kF32, {50}, 2),
               b = random(DType::kF32, {50}, 3);
    const Host y(DType::kF32, {1, 50});
    layernorm(x, w, b, y, kEps);
    for (int i = 0; i < 50; ++i) EXPECT_NEAR(y.at(i), b.at(i), 1e-3);
  });
}

TEST(Layernorm, works_in_place) {
  testing::for_each_isa([] {
    const Host x = random(DType::kBF16, {5, 100}, 1), w = random(DType::kF32, {100}, 2),
               b = random(DType::kF32, {100}, 3);
    const Host y(DType::kBF16, {5, 100});
    layernorm(x, w, b, y, kEps);
    layernorm(x, w, b, x, kEps);
    EXPECT_TRUE(testing::same_bits(x, y));
  });
}

TEST(LayernormBackward, the_reference_is_the_gradient) {
  const Host x = random(DType::kF64, {3, 7}, 1), w = random(DType::kF64, {7}, 2),
             b = random(DType::kF64, {7}, 3);
  const Host dy = random(DType::kF64, {3, 7}, 4), y(DType::kF64, {3, 7});
  const Host dx(DType::kF64, {3, 7}), dw(DType::kF64, {7}), db(DType::kF64, {7});
  const auto loss = [&] {
    layernorm_ref(x, w, b, y, 1e-2f);
    return testing::dot(dy, y);
  };
  layernorm_backward_ref(x, w, dy, 1e-2f, dx, false, dw, db);
  EXPECT_TRUE(close(dx, testing::numeric_gradient(x, loss), 1e-8));
  EXPECT_TRUE(close(dw, testing::numeric_gradient(w, loss), 1e-8));
  EXPECT_TRUE(close(db, testing::numeric_gradient(b, loss), 1e-8));
}

TEST(LayernormBackward, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    Arena scratch("test", 1 << 20);
    for (int64_t T : {0, 1, 64, 65, 200}) {
      for (int64_t C : {3, 7, 128, 129}) {
        for (DType xt : kTypes) {
          for (DType gt : kTypes) {
            for (bool accumulate : {false, true}) {
              const Host x = random(xt, {T, C}, 1, 3), w = random(xt, {C}, 2),
                         dy = random(gt, {T, C}, 3);
              const Host dx = random(gt, {T, C}, 4), dw = random(DType::kF32, {C}, 5),
                         db = random(DType::kF32, {C}, 6);
              const Host dx_want = testing::copy_as(DType::kF64, dx),
                         dw_want = testing::copy_as(DType::kF64, dw);
              const Host db_want = testing::copy_as(DType::kF64, db);
              layernorm_backward(x, w, dy, 1e-2f, dx, accumulate, dw, db, scratch);
              layernorm_backward_ref(x, w, dy, 1e-2f, dx_want, accumulate, dw_want, db_want);
              // Few elements a row: the terms of dx cancel.
              ASSERT_TRUE(close(dx, dx_want, (C == 3 ? 1e-4 : 3e-6) + testing::rounding(gt)))
                  << T << " x " << C;
              ASSERT_TRUE(close(dw, dw_want, 2e-6)) << T << " x " << C;
              ASSERT_TRUE(close(db, db_want, 2e-6)) << T << " x " << C;
            }
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace m3
