#include "ops/vit_attend/vit_attend_impl.h"

namespace m3 {

float vit_softmax_avx2(float* scores, int64_t n, int64_t padded, VitRow* row) {
  return softmax_row(scores, n, padded, row);
}

void vit_gradient_avx2(float* scores, float* gradients, int64_t n, int64_t padded, const float* lse,
                       const float* delta, bool per_row) {
  gradient_row(scores, gradients, n, padded, lse, delta, per_row);
}

}  // namespace m3
