#include "ops/rmsnorm/rmsnorm.h"

#include "base/threads.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};
constexpr float kEps = 1e-6f;

TEST(Rmsnorm, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t T : {0, 1, 3, 129}) {
      for (int64_t C : {1, 7, 64, 127, 128, 129, 1024}) {
        for (DType xt : kTypes) {
          for (DType wt : kTypes) {
            for (DType yt : kTypes) {
              const Host x = random(xt, {T, C}, 1, 3), w = random(wt, {C}, 2, 0.3), y(yt, {T, C}),
                         want(DType::kF64, {T, C});
              rmsnorm(x, w, y, kEps);
              rmsnorm_ref(x, w, want, kEps);
              ASSERT_TRUE(close(y, want, 5e-7 + testing::rounding(yt))) << T << " x " << C;
            }
          }
        }
      }
    }
  });
}

TEST(Rmsnorm, stored_weight_zero_is_the_plain_norm) {
  const Host x(DType::kF32, {1, 2}), w(DType::kF32, {2}), y(DType::kF32, {1, 2});
  x.ptr<float>()[0] = 3;
  x.ptr<float>()[1] = 4;
  rmsnorm(x, w, y, 0);
  EXPECT_NEAR(y.at(0), 3 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(y.at(1), 4 / std::sqrt(12.5), 1e-6);
}

TEST(Rmsnorm, a_row_of_zeros_stays_zero) {
  testing::for_each_isa([] {
    const Host x(DType::kF32, {2, 40}), w = random(DType::kF32, {40}, 2),
                                        y = random(DType::kF32, {2, 40}, 3);
    rmsnorm(x, w, y, kEps);
    for (int i = 0; i < 80; ++i) EXPECT_EQ(y.at(i), 0);
  });
}

TEST(Rmsnorm, works_in_place) {
  testing::for_each_isa([] {
    const Host x = random(DType::kBF16, {5, 100}, 1), w = random(DType::kBF16, {100}, 2),
               y(DType::kBF16, {5, 100});
    rmsnorm(x, w, y, kEps);
    rmsnorm(x, w, x, kEps);
    EXPECT_TRUE(testing::same_bits(x, y));
  });
}

TEST(Rmsnorm, the_residual_is_added_and_rounded_before_the_norm) {
  testing::for_each_isa([] {
    for (DType xt : kTypes) {
      const Host x = random(xt, {9, 131}, 1), delta = random(DType::kBF16, {9, 131}, 2),
                 w = random(DType::kBF16, {131}, 3);
      const Host sum(xt, {9, 131}), y(DType::kF32, {9, 131}), want(DType::kF32, {9, 131});
      for (int64_t i = 0; i < sum->numel(); ++i) {
        set_value(sum, i, static_cast<float>(x.at(i)) + static_cast<float>(delta.at(i)));
      }
      rmsnorm(sum, w, want, kEps);
      add_rmsnorm(x, delta, w, y, kEps);
      EXPECT_TRUE(testing::same_bits(x, sum));
      EXPECT_TRUE(testing::same_bits(y, want));
    }
  });
}

TEST(Rmsnorm, rows_do_not_depend_on_the_batch) {
  testing::for_each_isa([] {
    const Host x = random(DType::kF32, {300, 200}, 1), w = random(DType::kF32, {200}, 2),
               all(DType::kF32, {300, 200});
    rmsnorm(x, w, all, kEps);
    for (int64_t t : {0, 1, 150, 299}) {
      const Host one(DType::kF32, {1, 200});
      rmsnorm((*x).rows(t, t + 1), w, one, kEps);
      EXPECT_TRUE(testing::same_bits(one, (*all).rows(t, t + 1)));
    }
  });
}

TEST(RmsnormBackward, the_reference_is_the_gradient) {
  const Host x = random(DType::kF64, {3, 7}, 1), w = random(DType::kF64, {7}, 2),
             dy = random(DType::kF64, {3, 7}, 3);
  const Host y(DType::kF64, {3, 7}), dx(DType::kF64, {3, 7}), dw(DType::kF64, {7});
  const auto loss = [&] {
    rmsnorm_ref(x, w, y, 1e-2f);
    return testing::dot(dy, y);
  };
  rmsnorm_backward_ref(x, w, dy, 1e-2f, dx, false, dw);
  EXPECT_TRUE(close(dx, testing::numeric_gradient(x, loss), 1e-8));
  EXPECT_TRUE(close(dw, testing::numeric_gradient(w, loss), 1e-8));
}

TEST(RmsnormBackward, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    Arena scratch("test", 1 << 20);
    for (int64_t T : {0, 1, 64, 65, 200}) {
      for (int64_t C : {1, 7, 128, 129}) {
        for (DType xt : kTypes) {
          for (DType gt : kTypes) {
            for (bool accumulate : {false, true}) {
              const Host x = random(xt, {T, C}, 1, 3), w = random(xt, {C}, 2, 0.3),
                         dy = random(gt, {T, C}, 3);
              const Host dx = random(gt, {T, C}, 4), dw = random(DType::kF32, {C}, 5);
              const Host dx_want = testing::copy_as(DType::kF64, dx),
                         dw_want = testing::copy_as(DType::kF64, dw);
              rmsnorm_backward(x, w, dy, 1e-2f, dx, accumulate, dw, scratch);
              rmsnorm_backward_ref(x, w, dy, 1e-2f, dx_want, accumulate, dw_want);
              // One element a row (C = 1): the terms of dx cancel to eps.
              ASSERT_TRUE(close(dx, dx_want, (C == 1 ? 1e-2 : 2e-6) + testing::rounding(gt)))
                  << T << " x " << C;
              ASSERT_TRUE(close(dw, dw_want, 2e-6)) << T << " x " << C;
            }
          }
        }
      }
    }
  });
}

TEST(RmsnormBackward, bits_do_not_depend_on_the_number_of_threads) {
  Arena scratch("test", 1 << 20);
  const Host x = random(DType::kBF16, {500, 70}, 1), w = random(DType::kF32, {70}, 2),
             dy = random(DType::kF32, {500, 70}, 3);
  const Host dx(DType::kF32, {500, 70});
  const int before = num_threads();
  Host first;
  for (int threads : {1, 2, 5}) {
    set_num_threads(threads);
    Host dw(DType::kF32, {70});
    rmsnorm_backward(x, w, dy, kEps, dx, false, dw, scratch);
    if (threads == 1)
      first = std::move(dw);
    else
      EXPECT_TRUE(testing::same_bits(dw, first)) << threads;
  }
  set_num_threads(before);
}

}  // namespace
}  // namespace m3
