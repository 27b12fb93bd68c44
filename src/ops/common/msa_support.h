// Which positions a query row sees, as a list: for references and tests, where clarity counts.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/common/msa_types.h"

namespace m3 {

// Query row t (position p of its sequence) in group r. `lists` as attend takes it. Empty for p < 0.
std::vector<int64_t> msa_visible_positions(const MsaGeometry& geometry, const MsaBatch& batch,
                                           const AttendSupport& support, const Tensor& lists, int64_t t, int64_t p,
                                           int r);

}  // namespace m3
