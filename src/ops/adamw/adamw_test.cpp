#include "ops/adamw/adamw.h"

#include "base/threads.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::Host;
using testing::random;

constexpr AdamW kConfig = {.lr = 0.01f, .weight_decay = 0.1f, .grad_factor = 0.5f};

TEST(AdamW, one_step_by_hand) {
  const Host w(DType::kF32, {1}), g(DType::kF32, {1}), m(DType::kF32, {1}), v(DType::kF32, {1});
  w.ptr<float>()[0] = 2;
  g.ptr<float>()[0] = 3;
  adamw(w, g, m, v, {}, {.lr = 0.1f, .eps = 0, .weight_decay = 0.5f, .step = 1});
  EXPECT_NEAR(m.at(0), 0.3, 1e-6);   // (1 - 0.9) · 3
  EXPECT_NEAR(v.at(0), 0.45, 1e-6);  // (1 - 0.95) · 9
  EXPECT_NEAR(w.at(0), 2 - 0.1 * (3.0 / 3.0 + 0.5 * 2), 1e-6);
}

TEST(AdamW, several_steps_equal_the_reference) {
  testing::for_each_isa([] {
    for (int64_t n : {0, 1, 7, 127, 128, 129, 9000}) {
      const Host w = random(DType::kF32, {n}, 1), m(DType::kF32, {n}), v(DType::kF32, {n}),
                 copy(DType::kBF16, {n});
      const Host w_ref = testing::copy_as(DType::kF64, w), m_ref(DType::kF64, {n}),
                 v_ref(DType::kF64, {n});
      AdamW config = kConfig;
      for (config.step = 1; config.step <= 4; ++config.step) {
        const Host g = random(DType::kF32, {n}, 10 + config.step);
        adamw(w, g, m, v, copy, config);
        adamw_ref(w_ref, g, m_ref, v_ref, {}, config);
      }
      ASSERT_TRUE(close(w, w_ref, 1e-6)) << n;
      ASSERT_TRUE(close(m, m_ref, 1e-6)) << n;
      ASSERT_TRUE(close(v, v_ref, 1e-6)) << n;
      EXPECT_TRUE(testing::same_bits(copy, testing::copy_as(DType::kBF16, w))) << n;
    }
  });
}

TEST(AdamW, moments_may_be_bf16) {
  testing::for_each_isa([] {
    const int64_t n = 333;
    const Host w = random(DType::kF32, {n}, 1), m(DType::kBF16, {n}), v(DType::kBF16, {n}),
               g = random(DType::kF32, {n}, 2);
    const Host w_ref = testing::copy_as(DType::kF64, w), m_ref(DType::kF64, {n}),
               v_ref(DType::kF64, {n});
    AdamW config = kConfig;
    for (config.step = 1; config.step <= 3; ++config.step) {
      adamw(w, g, m, v, {}, config);
      adamw_ref(w_ref, g, m_ref, v_ref, {}, config);
    }
    EXPECT_TRUE(close(m, m_ref, 1e-2));
    EXPECT_TRUE(close(v, v_ref, 1e-2));
    EXPECT_TRUE(close(w, w_ref, 1e-4));
  });
}

// Masters must be the same on every machine and in every piece of a sharded tensor.
TEST(AdamW, bits_depend_on_nothing_but_the_operands) {
  const int64_t n = 20001;
  Host first;
  testing::for_each_isa([&] {
    for (int threads : {1, 3}) {
      const int before = num_threads();
      set_num_threads(threads);
      Host w = random(DType::kF32, {n}, 1);
      const Host m = random(DType::kF32, {n}, 2), v(DType::kF32, {n}),
                 g = random(DType::kF32, {n}, 3);
      adamw((*w).rows(0, 13), (*g).rows(0, 13), (*m).rows(0, 13), (*v).rows(0, 13), {}, kConfig);
      adamw((*w).rows(13, n), (*g).rows(13, n), (*m).rows(13, n), (*v).rows(13, n), {}, kConfig);
      set_num_threads(before);
      if (!(*first).defined())
        first = std::move(w);
      else
        EXPECT_TRUE(testing::same_bits(w, first)) << threads << " threads";
    }
  });
}

TEST(AdamW, the_norm_is_exact_to_fp64_and_independent_of_threads) {
  const Host g = random(DType::kF32, {3, 7001}, 1);
  double want = 0;
  for (int64_t i = 0; i < g->numel(); ++i) want += g.at(i) * g.at(i);
  const int before = num_threads();
  set_num_threads(1);
  const double one = grad_sum_of_squares(g);
  set_num_threads(3);
  EXPECT_EQ(grad_sum_of_squares(g), one);
  set_num_threads(before);
  EXPECT_NEAR(one, want, want * 1e-12);  // the plain sum itself is off by 3e-14
  g.ptr<float>()[5] = NAN;
  EXPECT_TRUE(std::isnan(grad_sum_of_squares(g)));
}

TEST(AdamW, clipping) {
  EXPECT_EQ(clip_factor(0.5, 1), 1);
  EXPECT_EQ(clip_factor(4, 1), 0.25f);
  EXPECT_EQ(clip_factor(4, 0), 1);
  EXPECT_THROW(clip_factor(NAN, 1), Error);
  EXPECT_THROW(clip_factor(INFINITY, 1), Error);
}

}  // namespace
}  // namespace m3
