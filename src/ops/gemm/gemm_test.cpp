#include "ops/gemm/gemm.h"

#include "base/fp8.h"
#include "base/threads.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using testing::close;
using testing::for_each_isa;
using testing::Host;
using testing::random;
using testing::rounding;
using testing::same_bits;

constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;

// A random e4m3 weight without NaN, scales around 1.
struct MxWeight {
  Host values, scales;
  MxWeight(int64_t n, int64_t k, uint64_t seed)
      : values(DType::kE4M3, {n, k}), scales(DType::kU8, {n, k / 32}) {
    Philox rng(seed);
    for (int64_t i = 0; i < n * k; ++i) {
      uint8_t byte = static_cast<uint8_t>(rng.below(256));
      if ((byte & 0x7f) == 0x7f) byte ^= 1;
      static_cast<uint8_t*>(values->data())[i] = byte;
    }
    for (int64_t i = 0; i < n * k / 32; ++i)
      scales.ptr<uint8_t>()[i] = static_cast<uint8_t>(120 + rng.below(14));
  }
  Weight weight() const { return Weight(*values, *scales); }
};

Arena& scratch() {
  static Arena arena("test", 64 << 20);
  return arena;
}

struct Size {
  int64_t m, n, k;
};
const Size kSizes[] = {{0, 5, 7},      {5, 0, 7},      {3, 4, 0},    {1, 1, 1},      {1, 128, 512},
                       {2, 129, 513},  {3, 127, 31},   {4, 5, 1100}, {7, 130, 64},   {8, 1, 1024},
                       {9, 133, 33},   {48, 4, 100},   {49, 3, 7},   {127, 128, 32}, {128, 129, 63},
                       {129, 12, 129}, {193, 130, 70}, {97, 7, 2049}};

TEST(Gemm, forward_equals_the_reference_in_every_type) {
  for_each_isa([] {
    for (const Size& s : kSizes) {
      for (DType xt : {kF32, kBF16}) {
        for (DType wt : {kF32, kBF16}) {
          for (DType yt : {kF32, kBF16}) {
            SCOPED_TRACE(fmt::format("{} x {} x {}, x {}, W {}, y {}", s.m, s.n, s.k,
                                     dtype_name(xt), dtype_name(wt), dtype_name(yt)));
            const Host x = random(xt, {s.m, s.k}, 1), w = random(wt, {s.n, s.k}, 2),
                       bias = random(wt, {s.n}, 3);
            const Host y(yt, {s.m, s.n}), want(DType::kF64, {s.m, s.n});
            gemm(x, *w, bias, y, {}, scratch());
            gemm_ref(x, *w, bias, want, false);
            // A row of a few sums may be small by cancellation.
            ASSERT_TRUE(close(y, want, (s.n < 4 ? 2e-5 : 1e-6) + rounding(yt)));
          }
        }
      }
    }
  });
}

TEST(Gemm, accumulates_into_y) {
  for_each_isa([] {
    for (int64_t m : {3, 130}) {
      const Host x = random(kF32, {m, 40}, 1), w = random(kBF16, {70, 40}, 2),
                 y = random(kF32, {m, 70}, 3);
      const Host want = testing::copy_as(DType::kF64, y);
      gemm(x, *w, {}, y, {.accumulate = true}, scratch());
      gemm_ref(x, *w, {}, want, true);
      ASSERT_TRUE(close(y, want, 2e-6));
    }
  });
}

TEST(Gemm, mxfp8_weights_are_decoded_exactly) {
  for_each_isa([] {
    for (const Size& s : {Size{1, 130, 1056}, Size{8, 5, 32}, Size{50, 64, 96}}) {
      for (DType xt : {kF32, kBF16}) {
        const MxWeight w(s.n, s.k, 5);
        const Host x = random(xt, {s.m, s.k}, 6), y(kF32, {s.m, s.n}),
                   want(DType::kF64, {s.m, s.n});
        gemm(x, w.weight(), {}, y, {}, scratch());
        gemm_ref(x, w.weight(), {}, want, false);
        ASSERT_TRUE(close(y, want, 2e-6)) << s.m << " x " << s.n << " x " << s.k;
      }
    }
  });
}

// Every byte of e4m3 under extreme scales, one at a time: the product with 1 is the value itself.
TEST(Gemm, every_e4m3_value_and_scale_comes_through) {
  for_each_isa([] {
    const Host x(kF32, {1, 32}), values(DType::kE4M3, {256, 32}), scales(DType::kU8, {256, 1}),
        y(kF32, {1, 256});
    x.ptr<float>()[3] = 1;
    for (int scale : {0, 1, 100, 127, 140, 246, 255}) {
      for (int byte = 0; byte < 256; ++byte) {
        static_cast<uint8_t*>(values->data())[byte * 32 + 3] = static_cast<uint8_t>(byte);
        scales.ptr<uint8_t>()[byte] = static_cast<uint8_t>(scale);
      }
      gemm(x, Weight(values, scales), {}, y, {}, scratch());
      for (int byte = 0; byte < 256; ++byte) {
        const float want =
            e4m3_decode(static_cast<uint8_t>(byte)) * e8m0_decode(static_cast<uint8_t>(scale));
        const float got = y.ptr<float>()[byte];
        ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
            << byte << " " << scale << ": " << got;
      }
    }
  });
}

// The promise the engine stands on: a row's bits do not depend on how many rows go with it.
TEST(Gemm, rows_are_bitwise_equal_for_every_batch_size) {
  const int before = num_threads();
  set_num_threads(1);  // many small products
  for_each_isa([] {
    for (DType xt : {kF32, kBF16}) {
      const int64_t M = 300, N = 6, K = 530;
      const Host x = random(xt, {M, K}, 7), w = random(kBF16, {N, K}, 8), all(kF32, {M, N}),
                 y(kF32, {M, N});
      gemm(x, *w, {}, all, {}, scratch());
      for (int64_t m = 1; m <= M; ++m) {
        const int64_t first = (m * 37) % (M - m + 1);  // the rows from `first` on, as a batch of m
        gemm((*x).rows(first, first + m), *w, {}, (*y).rows(0, m), {}, scratch());
        ASSERT_TRUE(same_bits((*y).rows(0, m), (*all).rows(first, first + m))) << "M = " << m;
      }
    }
  });
  set_num_threads(before);
}

TEST(Gemm, mxfp8_rows_are_bitwise_equal_for_every_batch_size) {
  for_each_isa([] {
    const int64_t M = 60, N = 6, K = 544;
    const MxWeight w(N, K, 5);
    const Host x = random(kBF16, {M, K}, 7), all(kF32, {M, N}), y(kF32, {M, N});
    gemm(x, w.weight(), {}, all, {}, scratch());
    for (int64_t m = 1; m <= M; ++m) {
      gemm((*x).rows(M - m, M), w.weight(), {}, (*y).rows(0, m), {}, scratch());
      ASSERT_TRUE(same_bits((*y).rows(0, m), (*all).rows(M - m, M))) << "M = " << m;
    }
  });
}

TEST(Gemm, bits_do_not_depend_on_the_number_of_threads) {
  for_each_isa([] {
    for (int64_t m : {5, 257}) {
      const Host x = random(kBF16, {m, 700}, 1), w = random(kBF16, {300, 700}, 2),
                 bias = random(kF32, {300}, 3);
      const Host one(kBF16, {m, 300}), many(kBF16, {m, 300});
      const int before = num_threads();
      set_num_threads(1);
      gemm(x, *w, bias, one, {}, scratch());
      for (int threads : {2, 3, 7}) {
        set_num_threads(threads);
        gemm(x, *w, bias, many, {}, scratch());
        EXPECT_TRUE(same_bits(one, many)) << m << " rows, " << threads << " threads";
      }
      set_num_threads(before);
    }
  });
}

TEST(Gemm, shared_input_equals_single_products) {
  for_each_isa([] {
    for (int64_t m : {1, 8, 9, 70}) {
      const Host x = random(kBF16, {m, 96}, 1), w0 = random(kBF16, {130, 96}, 2),
                 w2 = random(kF32, {5, 96}, 4);
      const MxWeight w1(33, 96, 3);
      const Weight weights[] = {*w0, w1.weight(), *w2};
      std::vector<GemmOutput> outputs;
      std::vector<Host> shared, single;
      for (const Weight& w : weights) {
        shared.emplace_back(kBF16, Shape{m, w.num_out()});
        single.emplace_back(kBF16, Shape{m, w.num_out()});
        outputs.push_back({w, {}, shared.back()});
        gemm(x, w, {}, single.back(), {}, scratch());
      }
      gemm_shared_input(x, outputs, {}, scratch());
      for (int i = 0; i < 3; ++i)
        EXPECT_TRUE(same_bits(shared[i], single[i])) << "output " << i << " of M = " << m;
    }
  });
}

TEST(Gemm, backward_equals_the_reference) {
  for_each_isa([] {
    for (const Size& s : {Size{0, 3, 4}, Size{1, 1, 1}, Size{5, 127, 129}, Size{129, 130, 31},
                          Size{530, 33, 34}, Size{31, 550, 40}}) {
      for (DType xt : {kF32, kBF16}) {
        for (DType wt : {kF32, kBF16}) {
          for (bool accumulate : {false, true}) {
            SCOPED_TRACE(fmt::format("{} x {} x {}, {} {} {}", s.m, s.n, s.k, dtype_name(xt),
                                     dtype_name(wt), accumulate));
            const Host dy = random(xt, {s.m, s.n}, 1), w = random(wt, {s.n, s.k}, 2),
                       x = random(wt, {s.m, s.k}, 3);
            const Host dx = random(kF32, {s.m, s.k}, 4), dw = random(kF32, {s.n, s.k}, 5),
                       db = random(kF32, {s.n}, 6);
            const Host dx_want = testing::copy_as(DType::kF64, dx),
                       dw_want = testing::copy_as(DType::kF64, dw);
            const Host db_want = testing::copy_as(DType::kF64, db);
            gemm_backward_x(dy, *w, dx, {.accumulate = accumulate}, scratch());
            gemm_backward_w(dy, x, dw, db, {.accumulate = accumulate}, scratch());
            gemm_backward_x_ref(dy, *w, dx_want, accumulate);
            gemm_backward_w_ref(dy, x, dw_want, db_want, accumulate);
            ASSERT_TRUE(close(dx, dx_want, 3e-6));
            ASSERT_TRUE(close(dw, dw_want, 3e-6));
            ASSERT_TRUE(close(db, db_want, 3e-6));
          }
        }
      }
    }
  });
}

// Whether oneDNN is built in or not, the option gives the same values.
TEST(Gemm, without_batch_invariance_the_values_are_as_good) {
  for_each_isa([] {
    const int64_t M = 129, N = 70, K = 100;
    for (DType type : {kF32, kBF16}) {
      const Host x = random(type, {M, K}, 1), w = random(type, {N, K}, 2),
                 bias = random(kF32, {N}, 3), dy = random(type, {M, N}, 4);
      const Host y = random(kF32, {M, N}, 5), dx(kF32, {M, K}), dw = random(kF32, {N, K}, 6),
                 db(kF32, {N});
      const Host y_want = testing::copy_as(DType::kF64, y), dx_want(DType::kF64, {M, K}),
                 dw_want = testing::copy_as(DType::kF64, dw);
      const Host db_want(DType::kF64, {N});
      gemm(x, *w, bias, y, {.batch_invariant = false, .accumulate = true}, scratch());
      gemm_ref(x, *w, bias, y_want, true);
      EXPECT_TRUE(close(y, y_want, 2e-6));
      gemm_backward_x(dy, *w, dx, {.batch_invariant = false}, scratch());
      gemm_backward_x_ref(dy, *w, dx_want, false);
      EXPECT_TRUE(close(dx, dx_want, 2e-6));
      gemm_backward_w(dy, x, dw, db, {.batch_invariant = false, .accumulate = true}, scratch());
      gemm_backward_w_ref(dy, x, dw_want, db_want, true);
      EXPECT_TRUE(close(dw, dw_want, 2e-6));
    }
  });
}

TEST(Gemm, backward_of_the_reference_is_the_gradient_of_its_forward) {
  const Host x = random(DType::kF64, {3, 5}, 1), w = random(DType::kF64, {4, 5}, 2),
             bias = random(DType::kF64, {4}, 3);
  const Host dy = random(DType::kF64, {3, 4}, 4), y(DType::kF64, {3, 4});
  const auto loss = [&] {
    gemm_ref(x, *w, bias, y, false);
    return testing::dot(dy, y);
  };
  const Host dx(DType::kF64, {3, 5}), dw(DType::kF64, {4, 5}), db(DType::kF64, {4});
  gemm_backward_x_ref(dy, *w, dx, false);
  gemm_backward_w_ref(dy, x, dw, db, false);
  EXPECT_TRUE(close(dx, testing::numeric_gradient(x, loss), 1e-8));
  EXPECT_TRUE(close(dw, testing::numeric_gradient(w, loss), 1e-8));
  EXPECT_TRUE(close(db, testing::numeric_gradient(bias, loss), 1e-8));
}

TEST(Gemm, wrong_operands_are_refused_by_name) {
  const Host x = random(kF32, {2, 32}, 1), w = random(kF32, {4, 33}, 2), y(kF32, {2, 4}),
             small(kF32, {2, 3});
  const MxWeight mx(4, 32, 3);
  const auto message = [&](const Weight& weight, const Tensor& out,
                           GemmOptions options = {}) -> std::string {
    try {
      gemm(x, weight, {}, out, options, scratch());
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(message(*w, y).find("x_MK is [2, 32] but W_NK is [4, 33]: K differs"),
            std::string::npos);
  EXPECT_NE(message(mx.weight(), small).find("y_MN must be [2, 4], got [2, 3]"), std::string::npos);
  EXPECT_NE(message(*mx.values, y).find("scales of W_NK must be [4, 1]"), std::string::npos);
  const Host bf16_y(kBF16, {2, 4});
  EXPECT_NE(message(mx.weight(), bf16_y, {.accumulate = true}).find("must be f32 to accumulate"),
            std::string::npos);
}

}  // namespace
}  // namespace m3
