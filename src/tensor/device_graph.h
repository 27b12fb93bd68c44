// Work recorded once and replayed: a CUDA graph with its own stream, timed by events on the device.
//   DeviceGraph graph(device, [&](Stream s) { index_select(..., s); attend(..., s); });
//   double ms = graph.replay_ms();
// What the body calls must be capturable: no allocation, no waiting. Without CUDA the constructor
// throws.
#pragma once
#include <functional>

#include "tensor/device.h"

namespace m3 {

class DeviceGraph {
 public:
  DeviceGraph(Device device, const std::function<void(Stream)>& body);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // Runs the recorded work once, waits for it, and returns its time on the device.
  double replay_ms();

 private:
  void* stream_ = nullptr;
  void* begin_ = nullptr;
  void* end_ = nullptr;
  void* executable_ = nullptr;
};

}  // namespace m3
