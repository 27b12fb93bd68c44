#include "ops/embed/embed.h"

#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::Host;
using testing::random;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};

TEST(Embed, copies_the_rows_of_the_ids) {
  for (int64_t T : {0, 1, 129}) {
    for (DType tt : kTypes) {
      for (DType yt : kTypes) {
        const Host table = random(tt, {50, 33}, 1), ids = testing::random_ints({T}, 2, 50),
                   y(yt, {T, 33});
        embed(ids, table, y);
        for (int64_t t = 0; t < T; ++t) {
          const Host want = testing::copy_as(yt, (*table)[ids.ptr<int32_t>()[t]]);
          EXPECT_TRUE(testing::same_bits((*y)[t], want)) << "token " << t;
        }
      }
    }
  }
}

TEST(Embed, replaced_rows_hold_the_features_and_the_others_stay) {
  const Host x = random(DType::kBF16, {6, 5}, 1), before = testing::copy_as(DType::kBF16, x);
  const Host features = random(DType::kF32, {2, 5}, 2), got(DType::kBF16, {2, 5});
  const Host rows(DType::kI32, {2});
  rows.ptr<int32_t>()[0] = 4;
  rows.ptr<int32_t>()[1] = 1;
  embed_replace(rows, features, x);
  for (int64_t t : {0, 2, 3, 5}) EXPECT_TRUE(testing::same_bits((*x)[t], (*before)[t]));
  gather_rows(rows, x, got);
  EXPECT_TRUE(testing::same_bits(got, testing::copy_as(DType::kBF16, features)));
}

TEST(Embed, an_id_outside_the_table_is_named) {
  const Host table(DType::kF32, {7, 2}), ids(DType::kI32, {3}), y(DType::kF32, {3, 2});
  ids.ptr<int32_t>()[1] = 7;
  try {
    embed(ids, table, y);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "ids_T[1] is 7, want 0 to 6");
  }
}

TEST(EmbedBackward, adds_the_rows_of_every_token_that_is_not_skipped) {
  for (int64_t T : {0, 1, 129, 700}) {
    for (DType type : kTypes) {
      const Host ids = testing::random_ints({T}, 2, 5), dy = random(type, {T, 33}, 1),
                 skip(DType::kU8, {T});
      for (int64_t t = 0; t < T; t += 3) skip.ptr<uint8_t>()[t] = 1;
      const Host dtable = random(DType::kF32, {6, 33}, 3),
                 want = testing::copy_as(DType::kF64, dtable);
      embed_backward(ids, skip, dy, dtable);
      embed_backward_ref(ids, skip, dy, want);
      EXPECT_TRUE(testing::close(dtable, want, 1e-6)) << T;
    }
  }
}

}  // namespace
}  // namespace m3
