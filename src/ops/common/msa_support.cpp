#include "ops/common/msa_support.h"

namespace m3 {

std::vector<int64_t> msa_visible_positions(const MsaGeometry& g, const MsaBatch& batch, const AttendSupport& support,
                                           const Tensor& lists, int64_t t, int64_t p, int r) {
  std::vector<int64_t> positions;
  if (p < 0) return positions;
  switch (support.kind) {
    case AttendSupport::Kind::kBlocks: {
      const int32_t* ids = lists.ptr<int32_t>() + (r * batch.num_queries + t) * g.topk;
      for (int s = 0; s < g.topk && ids[s] >= 0; ++s) {
        for (int64_t j = int64_t{ids[s]} * g.block; j < (ids[s] + int64_t{1}) * g.block && j <= p; ++j) {
          positions.push_back(j);
        }
      }
      break;
    }
    case AttendSupport::Kind::kFull:
      for (int64_t j = 0; j <= p; ++j) positions.push_back(j);
      break;
    case AttendSupport::Kind::kWindow:
      for (int64_t j = 0; j <= p; ++j) {
        if (p - j < support.window || j < support.sink) positions.push_back(j);
      }
      break;
    case AttendSupport::Kind::kTokens: {
      const int32_t* tokens = lists.ptr<int32_t>() + t * support.budget;
      for (int64_t s = 0; s < support.budget && tokens[s] >= 0; ++s) positions.push_back(tokens[s]);
      break;
    }
  }
  return positions;
}

}  // namespace m3
