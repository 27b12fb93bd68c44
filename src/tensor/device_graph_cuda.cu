#include "tensor/cuda_check.h"
#include "tensor/device_graph.h"

namespace m3 {

DeviceGraph::DeviceGraph(Device device, const std::function<void(Stream)>& body) {
  M3_CUDA_CHECK(cudaSetDevice(device.index));
  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  M3_CUDA_CHECK(cudaStreamCreate(&stream));
  stream_ = stream;
  M3_CUDA_CHECK(cudaEventCreate(&begin));
  begin_ = begin;
  M3_CUDA_CHECK(cudaEventCreate(&end));
  end_ = end;
  M3_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  body(Stream{stream});
  M3_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  M3_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  executable_ = executable;
  M3_CUDA_CHECK(cudaGraphDestroy(graph));
}

DeviceGraph::~DeviceGraph() {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  cudaEventDestroy(static_cast<cudaEvent_t>(begin_));
  cudaEventDestroy(static_cast<cudaEvent_t>(end_));
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

double DeviceGraph::replay_ms() {
  const auto stream = static_cast<cudaStream_t>(stream_);
  M3_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(begin_), stream));
  M3_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), stream));
  M3_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(end_), stream));
  M3_CUDA_CHECK(cudaStreamSynchronize(stream));
  float ms = 0;
  M3_CUDA_CHECK(
      cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin_), static_cast<cudaEvent_t>(end_)));
  return ms;
}

}  // namespace m3
