#include "ops/qknorm_rope/qknorm_rope_impl.h"

namespace m3 {

void qknorm_rope_portable(const QknormRopeParams& params, int64_t token_begin, int64_t token_end) {
  qknorm_rope_tokens(params, token_begin, token_end);
}

}  // namespace m3
