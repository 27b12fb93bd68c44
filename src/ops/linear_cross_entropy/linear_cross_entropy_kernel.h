// Between linear_cross_entropy.cpp and its kernel files: one row of logits.
#pragma once
#include <cstdint>

namespace m3 {

// log Σ e^z over z[0:n].
using LceLogSum = double (*)(const float* z, int64_t n);
// out[v] = scale · e^(z[v] − logz), f32 or bf16; out may be z.
using LceSoftmax = void (*)(const float* z, int64_t n, float logz, float scale, void* out,
                            bool out_bf16);

double lce_log_sum_portable(const float* z, int64_t n);
double lce_log_sum_avx2(const float* z, int64_t n);
double lce_log_sum_avx512(const float* z, int64_t n);
void lce_softmax_portable(const float* z, int64_t n, float logz, float scale, void* out,
                          bool out_bf16);
void lce_softmax_avx2(const float* z, int64_t n, float logz, float scale, void* out, bool out_bf16);
void lce_softmax_avx512(const float* z, int64_t n, float logz, float scale, void* out,
                        bool out_bf16);

}  // namespace m3
