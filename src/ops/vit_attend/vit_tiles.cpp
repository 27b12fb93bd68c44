#include "ops/vit_attend/vit_tiles.h"

#include <algorithm>

#include "ops/common/checks.h"

namespace m3 {

std::vector<VitItem> vit_items(std::span<const int32_t> cu_segments, int64_t num_tokens, int64_t num_heads,
                               int64_t block_rows) {
  M3_CHECK(!cu_segments.empty() && cu_segments.front() == 0 && cu_segments.back() == num_tokens,
           "cu_segments must go from 0 to {} tokens, got {} offsets from {} to {}", num_tokens, cu_segments.size(),
           cu_segments.empty() ? -1 : cu_segments.front(), cu_segments.empty() ? -1 : cu_segments.back());
  std::vector<VitItem> items;
  for (size_t s = 0; s + 1 < cu_segments.size(); ++s) {
    const int64_t begin = cu_segments[s], end = cu_segments[s + 1];
    M3_CHECK(begin <= end, "cu_segments[{}] is {} after {}: offsets must ascend", s + 1, end, begin);
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t row = begin; row < end; row += block_rows) {
        items.push_back({begin, end, head, row, std::min(end, row + block_rows)});
      }
    }
  }
  return items;
}

void vit_row(const Tensor& x_THD, int64_t token, int64_t head, float factor, float* out_D) {
  const int64_t D = x_THD.dim(2), at = (token * x_THD.dim(1) + head) * D;
  with_float(x_THD, [&](const auto* x) {
    for (int64_t d = 0; d < D; ++d) out_D[d] = to_float(x[at + d]) * factor;
  });
}

}  // namespace m3
