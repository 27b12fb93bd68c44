// Between swiglu_oai.cpp and its kernel files.
#pragma once
#include <cstdint>

namespace m3 {

struct SwigluOaiParams {
  const void *gate, *up;
  void* a;
  bool gate_bf16, up_bf16, a_bf16;
  float alpha, limit, beta;
};

void swiglu_oai_portable(const SwigluOaiParams& params, int64_t begin, int64_t end);
void swiglu_oai_avx2(const SwigluOaiParams& params, int64_t begin, int64_t end);

struct SwigluOaiBackwardParams {
  SwigluOaiParams forward;  // a is not used
  const void* da;
  void *dgate, *dup;
  bool da_bf16, dgate_bf16, dup_bf16;
};

void swiglu_oai_backward_portable(const SwigluOaiBackwardParams& params, int64_t begin, int64_t end);
void swiglu_oai_backward_avx2(const SwigluOaiBackwardParams& params, int64_t begin, int64_t end);

}  // namespace m3
