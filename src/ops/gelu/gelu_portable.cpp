#include "ops/gelu/gelu_impl.h"

namespace m3 {

void gelu_portable(const void* x, bool x_bf16, void* y, bool y_bf16, int64_t begin, int64_t end) {
  gelu_range(x, x_bf16, y, y_bf16, begin, end);
}

void gelu_backward_portable(const GeluBackwardParams& params, int64_t begin, int64_t end) {
  gelu_backward_range(params, begin, end);
}

}  // namespace m3
