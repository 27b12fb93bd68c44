// Plain loops: the compiler vectorises them, and memory is the limit.
#include "ops/elementwise/elementwise.h"

#include <cstring>

#include "ops/common/checks.h"
#include "ops/common/rows.h"

namespace m3 {

void add(const Tensor& a, const Tensor& b, const Tensor& y, Stream) {
  check_float("a", a);
  check_float("b", b, a.shape());
  check_float("y", y, a.shape());
  parallel_rows(a.numel(), 1, [&](int64_t begin, int64_t end) {
    with_float(a, [&](const auto* from_a) {
      with_float(b, [&](const auto* from_b) {
        mutable_float(y, [&](auto* to) {
          for (int64_t i = begin; i < end; ++i)
            round_to(to_float(from_a[i]) + to_float(from_b[i]), to + i);
        });
      });
    });
  });
}

void cast(const Tensor& x, const Tensor& y, Stream) {
  check_float("x", x);
  check_float("y", y, x.shape());
  parallel_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
    with_float(x, [&](const auto* from) {
      mutable_float(y, [&](auto* to) {
        for (int64_t i = begin; i < end; ++i) round_to(to_float(from[i]), to + i);
      });
    });
  });
}

void fill_zero(const Tensor& y, Stream) {
  M3_CHECK(y.device().is_cpu(), "fill_zero: the tensor lies on {}", y.device().str());
  parallel_rows(y.bytes(), 1, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(y.data()) + begin, 0, end - begin);
  });
}

}  // namespace m3
