#include "ops/rmsnorm/rmsnorm_impl.h"

namespace m3 {

void rmsnorm_portable(const RmsnormParams& params, int64_t row_begin, int64_t row_end) {
  rmsnorm_rows(params, row_begin, row_end);
}

void rmsnorm_backward_portable(const RmsnormBackwardParams& params, int64_t row_begin,
                               int64_t row_end, float* dw_C) {
  rmsnorm_backward_rows(params, row_begin, row_end, dw_C);
}

}  // namespace m3
