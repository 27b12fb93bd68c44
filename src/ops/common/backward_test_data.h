// For the tests of attend_backward and index_kl: packed sequences with random inputs of unit variance, outputs in
// which an element that is not written shows, and the error measure of msa.md §14.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/rng.h"
#include "ops/common/msa_types.h"
#include "tensor/arena.h"

namespace m3::msa_test {

struct BackwardCase {
  std::string name;
  MsaGeometry geometry;
  std::vector<int32_t> cu_q, cu_k, lead;
  AttendSupport support;
  DType dtype = DType::kF32;
};

// The batch of a case and the memory of a test. `batch` points into `test`.
struct BackwardFixture {
  BackwardFixture(const BackwardCase& c, uint64_t seed) : test(c), arena("test", int64_t{256} << 20), rng(seed) {
    batch.num_seqs = static_cast<int>(test.cu_q.size()) - 1;
    batch.num_queries = test.cu_q.back();
    batch.cu_q = test.cu_q.data();
    batch.cu_k = test.cu_k.data();
    if (!test.lead.empty()) batch.lead = test.lead.data();
  }
  BackwardFixture(const BackwardFixture&) = delete;
  BackwardFixture& operator=(const BackwardFixture&) = delete;

  Tensor normal(DType dtype, Shape shape) {
    const Tensor t = arena.alloc("input", dtype, shape);
    for (int64_t i = 0; i < t.numel(); ++i) {
      const float x = static_cast<float>(rng.normal());
      if (dtype == DType::kF32) {
        t.ptr<float>()[i] = x;
      } else {
        t.ptr<bf16>()[i] = bf16(x);
      }
    }
    return t;
  }
  Tensor poisoned(Shape shape) {
    const Tensor t = arena.alloc("output", DType::kF32, shape);
    std::fill_n(t.ptr<float>(), t.numel(), std::nanf(""));
    return t;
  }
  void* workspace(int64_t bytes) {
    void* memory = arena.alloc_bytes("workspace", bytes);
    std::memset(memory, 0xff, bytes);
    return memory;
  }

  BackwardCase test;
  Arena arena;
  Philox rng;
  MsaBatch batch;
};

// Row error of msa.md §14: against max(row norm, 0.1 RMS of the row norms). Returns the largest; NaN if there is one.
inline double max_row_error(const Tensor& got, const Tensor& want) {
  const int64_t dim = want.dim(want.rank() - 1), rows = dim > 0 ? want.numel() / dim : 0;
  std::vector<double> norm(rows), diff(rows);
  double square = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < dim; ++c) {
      const double w = want.ptr<float>()[i * dim + c], d = got.ptr<float>()[i * dim + c] - w;
      norm[i] += w * w;
      diff[i] += d * d;
    }
    square += norm[i];
  }
  const double floor = 0.1 * std::sqrt(square / std::max<int64_t>(1, rows));
  double worst = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const double e = std::sqrt(diff[i]) / std::max({std::sqrt(norm[i]), floor, 1e-30});
    if (std::isnan(e)) return e;
    worst = std::max(worst, e);
  }
  return worst;
}

// One seed a run of the program; tests name it on failure.
inline uint64_t fresh_seed() {
  static const uint64_t seed = std::random_device{}();
  return seed;
}

}  // namespace m3::msa_test
