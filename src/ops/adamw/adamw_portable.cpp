#include "ops/adamw/adamw_impl.h"

namespace m3 {

void adamw_portable(const AdamWParams& params, int64_t begin, int64_t end) {
  adamw_range(params, begin, end);
}

}  // namespace m3
