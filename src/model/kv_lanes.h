// What a page of a cache consists of, lane by lane: for whoever stores, sends or converts pages (offload, connectors,
// other processes). A page is complete only with all of its lanes; whoever meets a lane that it does not know must
// refuse the cache (serving.md §13).
#pragma once
#include <vector>

#include "model/kv_cache.h"

namespace m3 {

// Of this description: goes up when a lane's meaning or order changes.
constexpr int kKvLanesVersion = 1;

struct KvLane {
  enum class Kind : uint8_t { kKeys, kValues, kIndexKeys };
  Kind kind;
  int layer;
  DType dtype;
  Shape page_shape;           // keys, values [R, B, D]; index keys [B, X]: heads before positions, row-major
  int64_t page_stride_bytes;  // page p of the lane begins at first_page + p * page_stride_bytes
  void* first_page;
};

// Layer by layer: keys, values, index keys where the layer has them.
std::vector<KvLane> kv_lanes(const KvCache& cache, int num_layers);

}  // namespace m3
