#include "model/kv_lanes.h"

namespace m3 {

std::vector<KvLane> kv_lanes(const KvCache& cache, int num_layers) {
  std::vector<KvLane> lanes;
  const auto add = [&](KvLane::Kind kind, int layer, const Tensor& lane) {
    if (!lane.defined()) return;
    const Tensor page = lane[0];
    lanes.push_back({kind, layer, lane.dtype(), page.shape(), page.bytes(), lane.data()});
  };
  for (int layer = 0; layer < num_layers; ++layer) {
    add(KvLane::Kind::kKeys, layer, cache.layer(layer).k_PRBD);
    add(KvLane::Kind::kValues, layer, cache.layer(layer).v_PRBD);
    add(KvLane::Kind::kIndexKeys, layer, cache.layer(layer).x_PBX);
  }
  return lanes;
}

}  // namespace m3
