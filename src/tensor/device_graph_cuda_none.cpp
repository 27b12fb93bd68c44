// The build without CUDA.
#include "base/check.h"
#include "tensor/device_graph.h"

namespace m3 {

DeviceGraph::DeviceGraph(Device device, const std::function<void(Stream)>&) {
  M3_FAIL("{}: {}", device.str(), cuda_unavailable_reason());
}
DeviceGraph::~DeviceGraph() = default;
double DeviceGraph::replay_ms() {
  M3_FAIL("{}", cuda_unavailable_reason());
}

}  // namespace m3
