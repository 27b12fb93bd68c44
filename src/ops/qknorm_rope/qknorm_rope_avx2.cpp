#include "ops/qknorm_rope/qknorm_rope_impl.h"

namespace m3 {

void qknorm_rope_avx2(const QknormRopeParams& params, int64_t token_begin, int64_t token_end) {
  qknorm_rope_tokens(params, token_begin, token_end);
}

void qknorm_rope_backward_avx2(const QknormRopeBackwardParams& params, int64_t token_begin,
                               int64_t token_end, float* dw_D) {
  qknorm_rope_backward_tokens(params, token_begin, token_end, dw_D);
}

}  // namespace m3
