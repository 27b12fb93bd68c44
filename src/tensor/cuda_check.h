// M3_CUDA_CHECK(call): throws Error with the call, the runtime's text, file and line; sm_count(). Only included
// where CUDA headers are.
#pragma once
#include <cuda_runtime.h>

#include "base/check.h"

#define M3_CUDA_CHECK(call)                                                                      \
  do {                                                                                           \
    const cudaError_t m3_cuda_status = (call);                                                   \
    M3_CHECK(m3_cuda_status == cudaSuccess, "{} failed: {} ({})", #call,                          \
             cudaGetErrorString(m3_cuda_status), static_cast<int>(m3_cuda_status));               \
  } while (0)

namespace m3 {

// Multiprocessors of the current device, asked once.
inline int sm_count() {
  static const int count = [] {
    int device = 0, value = 0;
    M3_CUDA_CHECK(cudaGetDevice(&device));
    M3_CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
    return value;
  }();
  return count;
}

}  // namespace m3
