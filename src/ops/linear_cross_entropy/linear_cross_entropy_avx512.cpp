#include "ops/linear_cross_entropy/linear_cross_entropy_impl.h"

namespace m3 {

double lce_log_sum_avx512(const float* z, int64_t n) {
  return log_sum(z, n);
}

void lce_softmax_avx512(const float* z, int64_t n, float logz, float scale, void* out,
                        bool out_bf16) {
  softmax(z, n, logz, scale, out, out_bf16);
}

}  // namespace m3
