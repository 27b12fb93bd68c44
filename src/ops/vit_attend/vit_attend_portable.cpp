#include "ops/vit_attend/vit_attend_impl.h"

namespace m3 {

float vit_softmax_portable(float* scores, int64_t n, int64_t padded, VitRow* row) {
  return softmax_row(scores, n, padded, row);
}

}  // namespace m3
