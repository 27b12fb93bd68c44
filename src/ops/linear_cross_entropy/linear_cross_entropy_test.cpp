#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include "base/threads.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

Arena& scratch() {
  static Arena arena("test", 128 << 20);
  return arena;
}

TEST(LinearCrossEntropy, the_reference_is_the_gradient) {
  const int64_t N = 3, C = 4, V = 6;
  const Host h = random(DType::kF64, {N, C}, 1), w = random(DType::kF64, {V, C}, 2),
             targets = testing::random_ints({N}, 3, 5), weights = random(DType::kF64, {N}, 4);
  const Host losses(DType::kF64, {N}), logz(DType::kF64, {N}), dh(DType::kF64, {N, C}),
      dw(DType::kF64, {V, C});
  const LinearCrossEntropy config = {.num_ids = 5, .z_weight = 0.25f, .factor = 0.5f, .weights_N = weights};
  const auto loss = [&] {
    linear_cross_entropy_ref(h, w, targets, config, losses, logz, {}, {});
    double sum = 0;
    for (int64_t n = 0; n < N; ++n) sum += 0.5 * weights.at(n) * (losses.at(n) + 0.25 * logz.at(n) * logz.at(n));
    return sum;
  };
  linear_cross_entropy_ref(h, w, targets, config, losses, logz, dh, dw);
  EXPECT_TRUE(close(dh, testing::numeric_gradient(h, loss), 1e-8));
  EXPECT_TRUE(close(dw, testing::numeric_gradient(w, loss), 1e-7));
}

TEST(LinearCrossEntropy, equals_the_reference) {
  testing::for_each_isa([] {
    struct Size {
      int64_t n, c, v, num_ids;
    };
    for (const Size& s : {Size{0, 8, 20, 0},
                          {1, 8, 1, 0},
                          {5, 33, 129, 120},
                          {130, 40, 257, 0},
                          {70, 16, 3001, 2999}}) {
      for (DType type : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(fmt::format("{} x {} x {}, {}", s.n, s.c, s.v, dtype_name(type)));
        const Host weights = random(DType::kF32, {s.n}, 5), argmax(DType::kI32, {s.n}), argmax_want(DType::kI32, {s.n});
        LinearCrossEntropy config = {
            .num_ids = s.num_ids, .z_weight = 1e-3f, .factor = 0.25f, .weights_N = weights, .argmax_N = argmax};
        const Host h = random(type, {s.n, s.c}, 1), w = random(type, {s.v, s.c}, 2);
        const Host targets = testing::random_ints({s.n}, 3, s.num_ids > 0 ? s.num_ids : s.v);
        const Host loss(DType::kF32, {s.n}), logz(DType::kF32, {s.n}), dh(type, {s.n, s.c});
        const Host loss_want(DType::kF64, {s.n}), logz_want(DType::kF64, {s.n}),
            dh_want(DType::kF64, {s.n, s.c});
        const Host dw = random(DType::kF32, {s.v, s.c}, 4),
                   dw_want = testing::copy_as(DType::kF64, dw);
        linear_cross_entropy(h, w, targets, config, loss, logz, dh, dw, scratch());
        config.argmax_N = argmax_want;
        linear_cross_entropy_ref(h, w, targets, config, loss_want, logz_want, dh_want, dw_want);
        ASSERT_TRUE(testing::same_bits(argmax, argmax_want));
        const bool f32 = type == DType::kF32;
        ASSERT_TRUE(close(loss, loss_want, 1e-6));
        ASSERT_TRUE(close(logz, logz_want, 1e-6));
        if (s.v == 1) continue;  // the gradients are 0 but for z's share and rounding
        ASSERT_TRUE(
            close((*dh).reshape({s.n * s.c}), (*dh_want).reshape({s.n * s.c}), f32 ? 2e-6 : 1e-2));
        ASSERT_TRUE(
            close((*dw).reshape({s.v * s.c}), (*dw_want).reshape({s.v * s.c}), f32 ? 2e-6 : 1e-2));
        const Host again(DType::kF32, {s.n});
        linear_cross_entropy(h, w, targets, config, again, logz, {}, {}, scratch());
        EXPECT_TRUE(testing::same_bits(again, loss));
      }
    }
  });
}

// More rows than one chunk of logits holds, in any number of threads.
TEST(LinearCrossEntropy, chunks_and_threads_give_the_same_bits) {
  const int64_t N = 200, C = 4, V = 70000;  // 119 rows a chunk
  const Host h = random(DType::kBF16, {N, C}, 1), w = random(DType::kBF16, {V, C}, 2),
             targets = testing::random_ints({N}, 3, V);
  const auto run = [&](int64_t first, int threads) {
    const int before = num_threads();
    set_num_threads(threads);
    std::array<Host, 3> out = {Host(DType::kF32, {N - first}), Host(DType::kBF16, {N - first, C}),
                               Host(DType::kF32, {V, C})};
    const Host logz(DType::kF32, {N - first});
    Arena arena("planned", linear_cross_entropy_scratch_bytes(N - first, V));
    linear_cross_entropy((*h).rows(first, N), w, (*targets).rows(first, N), {}, out[0], logz,
                         out[1], out[2], arena);
    set_num_threads(before);
    return out;
  };
  const auto one = run(0, 1), three = run(0, 3), part = run(150, 2);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(testing::same_bits(one[i], three[i])) << i;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(testing::same_bits(part[i], (*one[i]).rows(150, N))) << i;
}

TEST(LinearCrossEntropy, a_sure_and_right_prediction_has_no_loss_and_huge_logits_stay_finite) {
  testing::for_each_isa([] {
    const Host h(DType::kF32, {2, 1}), w(DType::kF32, {3, 1}), targets(DType::kI32, {2}),
        loss(DType::kF32, {2}), logz(DType::kF32, {2});
    const Host dh(DType::kF32, {2, 1}), dw(DType::kF32, {3, 1});
    h.ptr<float>()[0] = h.ptr<float>()[1] = 1e4f;
    w.ptr<float>()[1] = 1;
    targets.ptr<int32_t>()[0] = 1;  // right; the second row is wrong
    linear_cross_entropy(h, w, targets, {}, loss, logz, dh, dw, scratch());
    EXPECT_EQ(loss.at(0), 0);
    EXPECT_EQ(loss.at(1), 1e4f);
    EXPECT_EQ(dh.at(0), 0);
    EXPECT_EQ(dh.at(1), 1);
  });
}

TEST(LinearCrossEntropy, a_target_without_a_token_is_named) {
  const Host h(DType::kF32, {2, 1}), w(DType::kF32, {3, 1}), targets(DType::kI32, {2}),
      loss(DType::kF32, {2}), logz(DType::kF32, {2});
  targets.ptr<int32_t>()[1] = 2;
  try {
    linear_cross_entropy(h, w, targets, {.num_ids = 2}, loss, logz, {}, {}, scratch());
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "targets_N[1] is 2, want 0 to 1");
  }
}

}  // namespace
}  // namespace m3
