// Plain loops, sums over k ascending in fp64.
#include "base/fp8.h"
#include "ops/common/values.h"
#include "ops/gemm/gemm.h"

namespace m3 {
namespace {

double weight_at(const Weight& w, int64_t n, int64_t k) {
  const int64_t at = n * w.num_in() + k;
  if (w.values.dtype() != DType::kE4M3) return value_at(w.values, at);
  const uint8_t byte = static_cast<const uint8_t*>(w.values.data())[at];
  return double{e4m3_decode(byte)} * e8m0_decode(w.scales.ptr<uint8_t>()[at / kMxBlock]);
}

void put(const Tensor& y, int64_t at, double value, bool accumulate) {
  set_value(y, at, accumulate ? value_at(y, at) + value : value);
}

}  // namespace

void gemm_ref(const Tensor& x_MK, const Weight& w_NK, const Tensor& bias_N, const Tensor& y_MN,
              bool accumulate) {
  const int64_t K = x_MK.dim(1), N = w_NK.num_out();
  for (int64_t m = 0; m < x_MK.dim(0); ++m) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += value_at(x_MK, m * K + k) * weight_at(w_NK, n, k);
      if (bias_N.defined()) sum += value_at(bias_N, n);
      put(y_MN, m * N + n, sum, accumulate);
    }
  }
}

void gemm_backward_x_ref(const Tensor& dy_MN, const Weight& w_NK, const Tensor& dx_MK,
                         bool accumulate) {
  const int64_t K = w_NK.num_in(), N = w_NK.num_out();
  for (int64_t m = 0; m < dy_MN.dim(0); ++m) {
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0;
      for (int64_t n = 0; n < N; ++n) sum += value_at(dy_MN, m * N + n) * weight_at(w_NK, n, k);
      put(dx_MK, m * K + k, sum, accumulate);
    }
  }
}

void gemm_backward_w_ref(const Tensor& dy_MN, const Tensor& x_MK, const Tensor& dw_NK,
                         const Tensor& db_N, bool accumulate) {
  const int64_t M = dy_MN.dim(0), N = dy_MN.dim(1), K = x_MK.dim(1);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0;
      for (int64_t m = 0; m < M; ++m) sum += value_at(dy_MN, m * N + n) * value_at(x_MK, m * K + k);
      put(dw_NK, n * K + k, sum, accumulate);
    }
    if (!db_N.defined()) continue;
    double sum = 0;
    for (int64_t m = 0; m < M; ++m) sum += value_at(dy_MN, m * N + n);
    put(db_N, n, sum, accumulate);
  }
}

}  // namespace m3
