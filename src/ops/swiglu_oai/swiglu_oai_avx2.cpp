#include "ops/swiglu_oai/swiglu_oai_impl.h"

namespace m3 {

void swiglu_oai_avx2(const SwigluOaiParams& params, int64_t begin, int64_t end) {
  swiglu_range(params, begin, end);
}

void swiglu_oai_backward_avx2(const SwigluOaiBackwardParams& params, int64_t begin, int64_t end) {
  swiglu_backward_range(params, begin, end);
}

}  // namespace m3
