// Between vit_attend.cpp and its kernel files: the softmax of one row of a tile.
#pragma once
#include <cstdint>

namespace m3 {

struct VitRow {
  float maximum;  // of the scores seen so far, base 2
  float sum;      // of 2^(score − maximum)
};

// scores[0:n] become 2^(score − new maximum); scores[n:padded] become 0. Returns 2^(old − new maximum), by which what was
// summed before must be multiplied.
using VitSoftmax = float (*)(float* scores, int64_t n, int64_t padded, VitRow* row);
float vit_softmax_portable(float* scores, int64_t n, int64_t padded, VitRow* row);
float vit_softmax_avx2(float* scores, int64_t n, int64_t padded, VitRow* row);
float vit_softmax_avx512(float* scores, int64_t n, int64_t padded, VitRow* row);

// Backward of one row of a tile. scores[i] become p = 2^(score − lse_i), gradients[i] (of p) become ds = p · (gradient −
// delta_i); elements n to padded become 0. lse and delta have one value for the row (per_row) or one for each element.
using VitGradient = void (*)(float* scores, float* gradients, int64_t n, int64_t padded, const float* lse,
                             const float* delta, bool per_row);
void vit_gradient_portable(float* scores, float* gradients, int64_t n, int64_t padded, const float* lse,
                           const float* delta, bool per_row);
void vit_gradient_avx2(float* scores, float* gradients, int64_t n, int64_t padded, const float* lse, const float* delta,
                       bool per_row);
void vit_gradient_avx512(float* scores, float* gradients, int64_t n, int64_t padded, const float* lse,
                         const float* delta, bool per_row);

}  // namespace m3
