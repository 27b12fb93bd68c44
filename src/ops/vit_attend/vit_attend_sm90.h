// Attention of the vision tower on the GPU (contract: vit_attend.h). bf16, head dim 64 or 80;
// memory bounded by a tile of 128 queries x 64 keys.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/device.h"

namespace m3 {

// Rows [begin, end) of one segment, whose keys are rows [first_key, last_key).
struct VitTile {
  int32_t begin, end, first_key, last_key;
};

// Host: the tiles of a call, longest segments first, so that the last ones to start are short.
// Upload them once per grid of images; they serve all heads and layers.
std::vector<VitTile> vit_attend_tiles(std::span<const int32_t> cu_segments);

struct VitAttendParams {
  const void *q_THD = nullptr, *k_THD = nullptr, *v_THD = nullptr;  // bf16
  int64_t token_stride = 0;  // elements between tokens; q, k, v may be parts of one projection
  void* o_THD = nullptr;     // bf16, contiguous
  float* lse_TH = nullptr;   // may be absent
  int heads = 0, head_dim = 0;
  float scale = 0;
  const VitTile* tiles = nullptr;  // device
  int num_tiles = 0;
};
void vit_attend_sm90(const VitAttendParams& params, Stream stream);

}  // namespace m3
