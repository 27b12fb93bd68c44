#include "base/rng.h"

#include <gtest/gtest.h>

#include <cmath>

namespace m3 {
namespace {

// Known-answer vectors published with the Random123 library (philox4x32, 10 rounds).
TEST(Philox, equals_the_published_vectors) {
  const auto zero = Philox(0, 0).block(0);
  EXPECT_EQ(zero, (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const auto ones = Philox(~uint64_t{0}, ~uint64_t{0}).block(~uint64_t{0});
  EXPECT_EQ(ones, (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Philox, a_stream_can_be_resumed_at_any_position) {
  Philox whole(7, 3);
  for (int i = 0; i < 13; ++i) whole.next_u32();
  Philox resumed(7, 3, whole.position());
  for (int i = 0; i < 20; ++i) EXPECT_EQ(whole.next_u32(), resumed.next_u32());
}

TEST(Philox, normal_has_unit_variance) {
  Philox rng(11);
  double sum = 0, square = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = rng.normal();
    sum += x;
    square += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);     // 4.5 standard errors
  EXPECT_NEAR(square / kCount, 1.0, 0.015);  // 4.7 standard errors
}

TEST(Philox, below_reaches_every_value_and_no_other) {
  Philox rng(5);
  int seen[7] = {};
  for (int i = 0; i < 7000; ++i) seen[rng.below(7)]++;
  for (int count : seen) EXPECT_NEAR(count, 1000, 150);  // 5 standard errors
}

}  // namespace
}  // namespace m3
