#include "ops/rmsnorm/rmsnorm_impl.h"

namespace m3 {

void rmsnorm_portable(const RmsnormParams& params, int64_t row_begin, int64_t row_end) {
  rmsnorm_rows(params, row_begin, row_end);
}

}  // namespace m3
