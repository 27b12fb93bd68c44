#include "ops/elementwise/elementwise.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::Host;
using testing::random;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};

TEST(Elementwise, add_rounds_the_fp32_sum_once) {
  for (int64_t n : {0, 1, 129, 40000}) {
    for (DType at : kTypes) {
      for (DType bt : kTypes) {
        for (DType yt : kTypes) {
          const Host a = random(at, {n}, 1), b = random(bt, {n}, 2), y(yt, {n}), want(yt, {n});
          add(a, b, y);
          for (int64_t i = 0; i < n; ++i)
            set_value(want, i, static_cast<float>(a.at(i)) + static_cast<float>(b.at(i)));
          EXPECT_TRUE(testing::same_bits(y, want)) << n;
        }
      }
    }
  }
}

TEST(Elementwise, cast_rounds_to_nearest_even_and_keeps_nan) {
  const Host x(DType::kF32, {4}), y(DType::kBF16, {4}), back(DType::kF32, {4});
  const float in[] = {1 + 0x1p-8f, 1 + 0x3p-8f, -INFINITY, NAN};
  std::copy(in, in + 4, x.ptr<float>());
  cast(x, y);
  cast(y, back);
  EXPECT_EQ(back.at(0), 1);
  EXPECT_EQ(back.at(1), 1 + 0x1p-6);
  EXPECT_EQ(back.at(2), -INFINITY);
  EXPECT_TRUE(std::isnan(back.at(3)));
}

TEST(Elementwise, fill_zero_writes_every_byte_of_any_type) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kI32, DType::kU8}) {
    for (const int64_t n : {0, 1, 33, 70000}) {
      const Host y(type, {n});
      std::memset(y->data(), 0xff, y->bytes());
      fill_zero(y);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(y.at(i), 0) << dtype_name(type) << " " << i;
    }
  }
}

}  // namespace
}  // namespace m3
