#include "base/fp8.h"

#include <gtest/gtest.h>

#include <cmath>

namespace m3 {
namespace {

TEST(Fp8, e4m3_known_codes) {
  EXPECT_EQ(e4m3_decode(0x00), 0.0f);
  EXPECT_TRUE(std::signbit(e4m3_decode(0x80)));
  EXPECT_EQ(e4m3_decode(0x01), 0x1p-9f);   // smallest subnormal
  EXPECT_EQ(e4m3_decode(0x07), 7 * 0x1p-9f);
  EXPECT_EQ(e4m3_decode(0x08), 0x1p-6f);   // smallest normal
  EXPECT_EQ(e4m3_decode(0x38), 1.0f);
  EXPECT_EQ(e4m3_decode(0xb9), -1.125f);
  EXPECT_EQ(e4m3_decode(0x7e), 448.0f);    // largest
  EXPECT_TRUE(std::isnan(e4m3_decode(0x7f)));
  EXPECT_TRUE(std::isnan(e4m3_decode(0xff)));
}

TEST(Fp8, e4m3_grows_with_its_code_and_the_table_agrees) {
  for (int i = 0; i < 0x7e; ++i) {
    EXPECT_LT(e4m3_decode(i), e4m3_decode(i + 1)) << i;
    EXPECT_EQ(kE4m3Values[i], e4m3_decode(i));
    EXPECT_EQ(kE4m3Values[i | 0x80], -kE4m3Values[i]);
  }
}

TEST(Fp8, e8m0_is_a_power_of_two) {
  for (int s = 0; s < 255; ++s) EXPECT_EQ(e8m0_decode(s), std::ldexp(1.0f, s - 127)) << s;
  EXPECT_TRUE(std::isnan(e8m0_decode(255)));
}

}  // namespace
}  // namespace m3
