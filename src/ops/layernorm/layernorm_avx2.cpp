#include "ops/layernorm/layernorm_impl.h"

namespace m3 {

void layernorm_avx2(const LayernormParams& params, int64_t row_begin, int64_t row_end) {
  layernorm_rows(params, row_begin, row_end);
}

}  // namespace m3
