#include "ops/layernorm/layernorm_impl.h"

namespace m3 {

void layernorm_portable(const LayernormParams& params, int64_t row_begin, int64_t row_end) {
  layernorm_rows(params, row_begin, row_end);
}

void layernorm_backward_portable(const LayernormBackwardParams& params, int64_t row_begin,
                                 int64_t row_end, float* dw_C, float* db_C) {
  layernorm_backward_rows(params, row_begin, row_end, dw_C, db_C);
}

}  // namespace m3
