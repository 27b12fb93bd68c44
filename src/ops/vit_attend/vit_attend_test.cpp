#include "ops/vit_attend/vit_attend.h"

#include "base/threads.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

Arena& scratch() {
  static Arena arena("test", 32 << 20);
  return arena;
}

struct Inputs {
  Host q, k, v;
  Inputs(DType type, int64_t T, int64_t H, int64_t D, double stddev = 1)
      : q(random(type, {T, H, D}, 1, stddev)), k(random(type, {T, H, D}, 2)), v(random(type, {T, H, D}, 3)) {}
};

TEST(VitAttend, equals_the_reference) {
  testing::for_each_isa([] {
    const std::vector<int32_t> segments[] = {{0}, {0, 1}, {0, 0, 3, 3}, {0, 127, 255, 384}, {0, 400}, {0, 5, 198, 200}};
    for (const std::vector<int32_t>& cu : segments) {
      for (auto [H, D] : {std::array<int64_t, 2>{2, 80}, {1, 12}, {3, 7}}) {
        for (DType type : {DType::kF32, DType::kBF16}) {
          const int64_t T = cu.back();
          const Inputs in(type, T, H, D, 3);  // peaked: the running maximum moves; scores of 10 carry 1e-6
          const Host o(type, {T, H, D}), lse(DType::kF32, {T, H}), want(DType::kF64, {T, H, D}), lse_want(DType::kF64, {T, H});
          const float scale = 1 / std::sqrt(static_cast<float>(D));
          vit_attend(in.q, in.k, in.v, cu, scale, o, lse, scratch());
          vit_attend_ref(in.q, in.k, in.v, cu, scale, want, lse_want);
          ASSERT_TRUE(close(o, want, 5e-6 + testing::rounding(type))) << T << " tokens, D = " << D;
          ASSERT_TRUE(close(lse, lse_want, 1e-6)) << T << " tokens, D = " << D;
        }
      }
    }
  });
}

// model.md §17.12: two images in one call equal each image alone, to the bit.
TEST(VitAttend, a_segment_does_not_feel_its_neighbours) {
  testing::for_each_isa([] {
    const int64_t H = 2, D = 20;
    const Inputs in(DType::kF32, 500, H, D);
    const Host both(DType::kF32, {500, H, D}), alone(DType::kF32, {300, H, D});
    const std::vector<int32_t> cu = {0, 200, 500}, one = {0, 300};
    vit_attend(in.q, in.k, in.v, cu, 0.2f, both, {}, scratch());
    vit_attend((*in.q).rows(200, 500), (*in.k).rows(200, 500), (*in.v).rows(200, 500), one, 0.2f, alone, {}, scratch());
    EXPECT_TRUE(testing::same_bits(alone, (*both).rows(200, 500)));
  });
}

TEST(VitAttend, bits_do_not_depend_on_the_number_of_threads) {
  const Inputs in(DType::kBF16, 400, 3, 80);
  const Host one(DType::kBF16, {400, 3, 80}), many(DType::kBF16, {400, 3, 80});
  const std::vector<int32_t> cu = {0, 100, 400};
  const int before = num_threads();
  set_num_threads(1);
  vit_attend(in.q, in.k, in.v, cu, 0.1f, one, {}, scratch());
  set_num_threads(3);
  vit_attend(in.q, in.k, in.v, cu, 0.1f, many, {}, scratch());
  set_num_threads(before);
  EXPECT_TRUE(testing::same_bits(one, many));
}

TEST(VitAttend, huge_scores_stay_finite) {
  testing::for_each_isa([] {
    const Inputs in(DType::kF32, 130, 1, 16, 1000);
    const Host o(DType::kF32, {130, 1, 16}), want(DType::kF64, {130, 1, 16});
    const std::vector<int32_t> cu = {0, 130};
    vit_attend(in.q, in.k, in.v, cu, 1, o, {}, scratch());
    vit_attend_ref(in.q, in.k, in.v, cu, 1, want, {});
    EXPECT_TRUE(close(o, want, 1e-2));  // scores near 10^4 carry 5e-4 of rounding into the exponent
  });
}

TEST(VitAttend, the_planned_scratch_is_what_is_used) {
  const Inputs in(DType::kF32, 700, 2, 80);
  const Host o(DType::kF32, {700, 2, 80});
  const std::vector<int32_t> cu = {0, 700};
  Arena arena("planned", vit_attend_scratch_bytes(700, 2, 80));
  vit_attend(in.q, in.k, in.v, cu, 0.1f, o, {}, arena);
  EXPECT_GT(arena.peak_bytes(), arena.capacity_bytes() - 2 * Arena::kAlignment);
}

TEST(VitAttend, offsets_that_do_not_cover_the_tokens_are_refused) {
  const Inputs in(DType::kF32, 10, 1, 4);
  const Host o(DType::kF32, {10, 1, 4});
  for (const std::vector<int32_t>& cu : {std::vector<int32_t>{0, 9}, {1, 10}, {0, 7, 5, 10}, {}}) {
    EXPECT_THROW(vit_attend(in.q, in.k, in.v, cu, 1, o, {}, scratch()), Error);
  }
}

TEST(VitAttendBackward, the_reference_is_the_gradient) {
  const Inputs in(DType::kF64, 7, 2, 3);
  const std::vector<int32_t> cu = {0, 4, 4, 7};
  const Shape shape = {7, 2, 3};
  const Host d_o = random(DType::kF64, shape, 4), o(DType::kF64, shape);
  const Host dq(DType::kF64, shape), dk(DType::kF64, shape), dv(DType::kF64, shape);
  const auto loss = [&] {
    vit_attend_ref(in.q, in.k, in.v, cu, 0.6f, o, {});
    return testing::dot(d_o, o);
  };
  vit_attend_backward_ref(in.q, in.k, in.v, d_o, cu, 0.6f, dq, dk, dv);
  EXPECT_TRUE(close(dq, testing::numeric_gradient(in.q, loss), 1e-7));
  EXPECT_TRUE(close(dk, testing::numeric_gradient(in.k, loss), 1e-7));
  EXPECT_TRUE(close(dv, testing::numeric_gradient(in.v, loss), 1e-7));
}

TEST(VitAttendBackward, equals_the_reference) {
  testing::for_each_isa([] {
    const std::vector<int32_t> segments[] = {{0}, {0, 1}, {0, 0, 3, 3}, {0, 127, 255, 384}, {0, 5, 198, 200}};
    for (const std::vector<int32_t>& cu : segments) {
      for (auto [H, D] : {std::array<int64_t, 2>{2, 80}, {1, 12}, {3, 7}}) {
        for (DType type : {DType::kF32, DType::kBF16}) {
          const int64_t T = cu.back();
          const Shape shape = {T, H, D};
          const Inputs in(type, T, H, D, 2);
          // The output that the forward really gave: in bf16 its rounding enters delta.
          const Host o(type, shape), lse(DType::kF32, {T, H}), d_o = random(type, shape, 4);
          const Host dq(type, shape), dk(type, shape), dv(type, shape);
          const Host dq_want(DType::kF64, shape), dk_want(DType::kF64, shape), dv_want(DType::kF64, shape);
          const float scale = 1 / std::sqrt(static_cast<float>(D));
          vit_attend(in.q, in.k, in.v, cu, scale, o, lse, scratch());
          vit_attend_backward(in.q, in.k, in.v, o, lse, d_o, cu, scale, dq, dk, dv, scratch());
          vit_attend_backward_ref(in.q, in.k, in.v, d_o, cu, scale, dq_want, dk_want, dv_want);
          // A segment of one token has no dq and no dk but rounding: compare whole tensors.
          const auto whole = [&](const Host& t) { return (*t).reshape({T * H * D}); };
          const double tolerance = type == DType::kF32 ? 1e-5 : 1e-2;
          ASSERT_TRUE(close(whole(dv), whole(dv_want), tolerance)) << T << " tokens, D = " << D;
          if (T < 2) continue;
          ASSERT_TRUE(close(whole(dq), whole(dq_want), tolerance)) << T << " tokens, D = " << D;
          ASSERT_TRUE(close(whole(dk), whole(dk_want), tolerance)) << T << " tokens, D = " << D;
        }
      }
    }
  });
}

TEST(VitAttendBackward, bits_do_not_depend_on_threads_or_neighbours) {
  const int64_t T = 400, H = 2, D = 20;
  const Shape shape = {T, H, D};
  const Inputs in(DType::kF32, T, H, D);
  const Host o(DType::kF32, shape), lse(DType::kF32, {T, H}), d_o = random(DType::kF32, shape, 4);
  const std::vector<int32_t> cu = {0, 150, 400}, alone = {0, 250};
  vit_attend(in.q, in.k, in.v, cu, 0.2f, o, lse, scratch());
  const auto run = [&](int64_t begin, std::span<const int32_t> offsets, int threads) {
    const int before = num_threads();
    set_num_threads(threads);
    const auto rows = [&](const Tensor& t) { return t.rows(begin, T); };
    const Shape part = {T - begin, H, D};
    std::array<Host, 3> g = {Host(DType::kF32, part), Host(DType::kF32, part), Host(DType::kF32, part)};
    vit_attend_backward(rows(in.q), rows(in.k), rows(in.v), rows(o), rows(lse), rows(d_o), offsets, 0.2f, g[0], g[1],
                        g[2], scratch());
    set_num_threads(before);
    return g;
  };
  const auto one = run(0, cu, 1), three = run(0, cu, 3), segment = run(150, alone, 2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(testing::same_bits(one[i], three[i])) << i;
    EXPECT_TRUE(testing::same_bits(segment[i], (*one[i]).rows(150, T))) << i;
  }
}

}  // namespace
}  // namespace m3
