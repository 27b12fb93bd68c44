#include "ops/qknorm_rope/qknorm_rope.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};
constexpr float kEps = 1e-6f;

struct Tables {
  Host cos, sin;
  Tables(const Tensor& pos_T, int64_t pairs, double theta = 5e6)
      : cos(DType::kF32, {pos_T.dim(0), pairs}), sin(DType::kF32, {pos_T.dim(0), pairs}) {
    rope_angles(pos_T, theta, cos, sin);
  }
};

Host positions(std::initializer_list<int32_t> values) {
  Host pos(DType::kI32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), pos.ptr<int32_t>());
  return pos;
}

TEST(QknormRope, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    for (int64_t T : {0, 1, 5, 129}) {
      for (auto [H, D, M] :
           {std::array<int64_t, 3>{1, 128, 32}, {3, 80, 39}, {2, 12, 6}, {4, 7, 3}, {1, 1, 0}}) {
        for (DType xt : kTypes) {
          for (DType yt : kTypes) {
            const Tables tables(testing::random_ints({T}, 9, 5000), M);
            const Host x = random(xt, {T, H, D}, 1, 3), w = random(xt, {D}, 2, 0.3);
            const Host y(yt, {T, H, D}), want(DType::kF64, {T, H, D});
            qknorm_rope(x, w, tables.cos, tables.sin, kEps, y);
            qknorm_rope_ref(x, w, tables.cos, tables.sin, kEps, want);
            ASSERT_TRUE(close(y, want, 1e-6 + testing::rounding(yt)))
                << T << " x " << H << " x " << D;
            rope(x, tables.cos, tables.sin, y);
            qknorm_rope_ref(x, {}, tables.cos, tables.sin, kEps, want);
            ASSERT_TRUE(close(y, want, 1e-6 + testing::rounding(yt)))
                << T << " x " << H << " x " << D;
          }
        }
      }
    }
  });
}

// model.md §17.11
TEST(QknormRope, position_0_and_the_dims_above_the_rotary_ones_pass_through) {
  testing::for_each_isa([] {
    const Host x = random(DType::kF32, {2, 3, 128}, 1), y(DType::kF32, {2, 3, 128});
    const Tables tables(positions({0, 77}), 32);
    rope(x, tables.cos, tables.sin, y);
    EXPECT_TRUE(testing::same_bits((*y)[0], (*x)[0]));
    for (int64_t h = 0; h < 3; ++h) {
      EXPECT_NE((*y)[1][h].ptr<float>()[0], (*x)[1][h].ptr<float>()[0]);
      EXPECT_TRUE(testing::same_bits((*y)[1][h].rows(64, 128), (*x)[1][h].rows(64, 128)));
    }
  });
}

TEST(QknormRope, a_head_and_its_double_are_equal_after_the_norm) {
  const Host x = random(DType::kF32, {1, 2, 64}, 1), w = random(DType::kF32, {64}, 2),
             y(DType::kF32, {1, 2, 64});
  for (int i = 0; i < 64; ++i) x.ptr<float>()[64 + i] = 2 * x.ptr<float>()[i];
  const Tables tables(positions({5}), 16);
  qknorm_rope(x, w, tables.cos, tables.sin, 0, y);
  EXPECT_TRUE(close((*y)[0][1], (*y)[0][0], 1e-6));
}

// The product of position and frequency is the fp32 one even where double would differ by 1e-2.
TEST(QknormRope, angles_are_the_fp32_products) {
  const int32_t p = 1000003;
  const Tables tables(positions({p}), 32);
  for (int m = 0; m < 32; ++m) {
    const float freq = 1.0f / powf(5000000.0f, static_cast<float>(2 * m) / 64.0f);
    const float angle = static_cast<float>(p) * freq;
    EXPECT_NEAR(tables.cos.at(m), std::cos(double{angle}), 6e-8) << "m = " << m;
    EXPECT_NEAR(tables.sin.at(m), std::sin(double{angle}), 6e-8) << "m = " << m;
  }
}

TEST(QknormRope, three_axes_follow_each_other) {
  ASSERT_EQ(rope_3d_pairs(80), 39);
  ASSERT_EQ(rope_3d_pairs(12), 6);
  Host pos(DType::kI32, {1, 3});
  const int32_t at[3] = {2, 31, 7};
  std::copy(at, at + 3, pos.ptr<int32_t>());
  const Host cos(DType::kF32, {1, 39}), sin(DType::kF32, {1, 39});
  rope_angles_3d(pos, 80, 10000, cos, sin);
  for (int i = 0; i < 39; ++i) {
    const double angle = at[i / 13] * std::pow(10000.0, -2.0 * (i % 13) / 26);
    EXPECT_NEAR(cos.at(i), std::cos(angle), 3e-6) << i;
    EXPECT_NEAR(sin.at(i), std::sin(angle), 3e-6) << i;
  }
}

TEST(QknormRope, works_in_place) {
  testing::for_each_isa([] {
    const Host x = random(DType::kBF16, {4, 3, 80}, 1), w = random(DType::kBF16, {80}, 2),
               y(DType::kBF16, {4, 3, 80});
    const Tables tables(positions({1, 2, 3, 100}), 39);
    qknorm_rope(x, w, tables.cos, tables.sin, kEps, y);
    qknorm_rope(x, w, tables.cos, tables.sin, kEps, x);
    EXPECT_TRUE(testing::same_bits(x, y));
  });
}

TEST(QknormRope, more_pairs_than_a_head_has_are_refused) {
  const Host x(DType::kF32, {1, 1, 6}), y(DType::kF32, {1, 1, 6});
  const Tables tables(positions({5}), 4);
  EXPECT_THROW(rope(x, tables.cos, tables.sin, y), Error);
}

TEST(QknormRopeBackward, the_reference_is_the_gradient) {
  const Tables tables(positions({3, 1000}), 3);
  const Host x = random(DType::kF64, {2, 2, 8}, 1), w = random(DType::kF64, {8}, 2),
             dy = random(DType::kF64, {2, 2, 8}, 3);
  const Host y(DType::kF64, {2, 2, 8}), dx(DType::kF64, {2, 2, 8}), dw(DType::kF64, {8});
  const auto loss = [&] {
    qknorm_rope_ref(x, w, tables.cos, tables.sin, 1e-2f, y);
    return testing::dot(dy, y);
  };
  qknorm_rope_backward_ref(x, w, tables.cos, tables.sin, 1e-2f, dy, dx, dw);
  EXPECT_TRUE(close(dx, testing::numeric_gradient(x, loss), 1e-8));
  EXPECT_TRUE(close(dw, testing::numeric_gradient(w, loss), 1e-8));
  const auto rotation = [&] {
    qknorm_rope_ref(x, {}, tables.cos, tables.sin, 0, y);
    return testing::dot(dy, y);
  };
  qknorm_rope_backward_ref(x, {}, tables.cos, tables.sin, 0, dy, dx, {});
  EXPECT_TRUE(close(dx, testing::numeric_gradient(x, rotation), 1e-8));
}

TEST(QknormRopeBackward, equals_the_reference_in_every_type_and_size) {
  testing::for_each_isa([] {
    Arena scratch("test", 1 << 20);
    for (int64_t T : {0, 1, 65, 130}) {
      for (auto [H, D, M] :
           {std::array<int64_t, 3>{1, 128, 32}, {3, 80, 39}, {2, 12, 6}, {4, 7, 3}}) {
        for (DType xt : kTypes) {
          for (DType gt : kTypes) {
            const Tables tables(testing::random_ints({T}, 9, 5000), M);
            const Host x = random(xt, {T, H, D}, 1, 3), w = random(xt, {D}, 2, 0.3),
                       dy = random(gt, {T, H, D}, 3);
            const Host dx(gt, {T, H, D}), dx_want(DType::kF64, {T, H, D});
            const Host dw = random(DType::kF32, {D}, 4),
                       dw_want = testing::copy_as(DType::kF64, dw);
            qknorm_rope_backward(x, w, tables.cos, tables.sin, kEps, dy, dx, dw, scratch);
            qknorm_rope_backward_ref(x, w, tables.cos, tables.sin, kEps, dy, dx_want, dw_want);
            ASSERT_TRUE(close(dx, dx_want, 3e-6 + testing::rounding(gt)))
                << T << " x " << H << " x " << D;
            ASSERT_TRUE(close(dw, dw_want, 3e-6)) << T << " x " << H << " x " << D;
            rope_backward(dy, tables.cos, tables.sin, dx);
            qknorm_rope_backward_ref({}, {}, tables.cos, tables.sin, 0, dy, dx_want, {});
            ASSERT_TRUE(close(dx, dx_want, 1e-6 + testing::rounding(gt)))
                << T << " x " << H << " x " << D;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace m3
