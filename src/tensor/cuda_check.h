// M3_CUDA_CHECK(call): throws Error with the call, the runtime's text, file and line. Only included
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
