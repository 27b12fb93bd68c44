#include "ops/moe_experts/moe_groups.h"

namespace m3 {

MoeGroups moe_group(const Tensor& ids_TK, int64_t num_experts) {
  const int64_t slots = ids_TK.numel(), K = ids_TK.dim(1);
  const int32_t* ids = ids_TK.ptr<int32_t>();
  MoeGroups groups;
  groups.begin.assign(num_experts + 1, 0);
  for (int64_t s = 0; s < slots; ++s) {
    M3_CHECK(0 <= ids[s] && ids[s] < num_experts, "ids_TK[{}, {}] is {}, want 0 to {}", s / K,
             s % K, ids[s], num_experts - 1);
    ++groups.begin[ids[s] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) groups.begin[e + 1] += groups.begin[e];
  groups.token.resize(slots);
  groups.row.resize(slots);
  std::vector<int64_t> next(groups.begin.begin(), groups.begin.end() - 1);
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t row = next[ids[s]]++;
    groups.token[row] = static_cast<int32_t>(s / K);
    groups.row[s] = static_cast<int32_t>(row);
  }
  return groups;
}

}  // namespace m3
