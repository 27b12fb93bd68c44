// Helpers of the operator tests: owned host tensors with random values, comparison with a reference, and a loop over
// the instruction sets of this machine.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "base/cpu_features.h"
#include "base/rng.h"
#include "ops/common/values.h"
#include "tensor/arena.h"

namespace m3::testing {

// A tensor and its memory.
class Host {
 public:
  Host() = default;
  Host(DType dtype, Shape shape) : bytes_(shape.numel() * dtype_bytes(dtype) + 64) {
    char* aligned = bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
    tensor_ = Tensor(aligned, dtype, shape);
  }
  Host(Host&&) = default;
  Host& operator=(Host&&) = default;
  operator const Tensor&() const { return tensor_; }
  const Tensor& operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }
  template <typename T> T* ptr() const { return tensor_.ptr<T>(); }
  double at(int64_t i) const { return value_at(tensor_, i); }

 private:
  std::vector<char> bytes_;
  Tensor tensor_;
};

// Normal values of the given standard deviation around `mean`.
inline Host random(DType dtype, Shape shape, uint64_t seed, double stddev = 1, double mean = 0) {
  Host host(dtype, shape);
  Philox rng(seed);
  for (int64_t i = 0; i < shape.numel(); ++i) set_value(host, i, mean + stddev * rng.normal());
  return host;
}

inline Host random_ints(Shape shape, uint64_t seed, int64_t limit) {
  Host host(DType::kI32, shape);
  Philox rng(seed);
  for (int64_t i = 0; i < shape.numel(); ++i) host.ptr<int32_t>()[i] = static_cast<int32_t>(rng.below(limit));
  return host;
}

inline Host copy_as(DType dtype, const Tensor& from) {
  Host host(dtype, from.shape());
  for (int64_t i = 0; i < from.numel(); ++i) set_value(host, i, value_at(from, i));
  return host;
}

// Row by row (last axis): norm of the difference over norm of the wanted row. Names the worst row and its largest miss.
inline ::testing::AssertionResult close(const Tensor& got, const Tensor& want, double tolerance) {
  if (got.shape() != want.shape()) {
    return ::testing::AssertionFailure() << "shape " << got.shape().str() << ", want " << want.shape().str();
  }
  const int64_t cols = got.rank() > 0 ? got.dim(got.rank() - 1) : 1;
  const int64_t rows = cols > 0 ? got.numel() / cols : 0;
  double worst = -1;
  int64_t worst_row = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double miss = 0, norm = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const double w = value_at(want, r * cols + c), d = value_at(got, r * cols + c) - w;
      miss += d * d;
      norm += w * w;
    }
    const double error = miss == 0 ? 0 : std::sqrt(miss / std::max(norm, 1e-30));
    if (!(error <= worst)) {
      worst = error;
      worst_row = r;
    }
  }
  if (worst <= tolerance) return ::testing::AssertionSuccess();
  int64_t at = worst_row * cols;
  for (int64_t c = 1; c < cols; ++c) {
    const auto miss = [&](int64_t i) { return std::abs(value_at(got, i) - value_at(want, i)); };
    if (!(miss(worst_row * cols + c) <= miss(at))) at = worst_row * cols + c;
  }
  return ::testing::AssertionFailure() << "row " << worst_row << " of " << got.shape().str() << " is off by "
                                       << worst << " (limit " << tolerance << "); column " << at - worst_row * cols
                                       << ": got " << value_at(got, at) << ", want " << value_at(want, at);
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

// Relative error that rounding the result to this type may cost, in close().
inline double rounding(DType dtype) { return dtype == DType::kBF16 ? 0x1p-8 : 0x1p-22; }

// Runs body once for each instruction set of this machine, with the name in every failure message.
inline void for_each_isa(const std::function<void()>& body) {
  const CpuIsa before = cpu_isa();
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (isa > cpu_isa_detected()) break;
    cpu_isa_override(isa);
    SCOPED_TRACE(cpu_isa_name(isa));
    body();
  }
  cpu_isa_override(before);
}

// d loss / d input[i] by central differences in fp64, where loss() reads `input` (f64).
inline Host numeric_gradient(const Host& input, const std::function<double()>& loss, double step = 1e-5) {
  Host gradient(DType::kF64, input->shape());
  for (int64_t i = 0; i < input->numel(); ++i) {
    double& x = input.ptr<double>()[i];
    const double saved = x;
    x = saved + step;
    const double up = loss();
    x = saved - step;
    const double down = loss();
    x = saved;
    gradient.ptr<double>()[i] = (up - down) / (2 * step);
  }
  return gradient;
}

// Σ a · b: a loss whose gradient with respect to b is a.
inline double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.numel(); ++i) sum += value_at(a, i) * value_at(b, i);
  return sum;
}

}  // namespace m3::testing
