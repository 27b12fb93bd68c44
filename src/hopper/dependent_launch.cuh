// Programmatic dependent launch, host side. The kernel may start before the grid before it in the
// stream has ended: every CTA must call grid_dependency_wait() (fence.cuh) before it touches what
// that grid writes, or reads.
#pragma once
#include <cuda_runtime.h>

#include "tensor/cuda_check.h"

namespace m3::hopper {

template <typename... Parameters, typename... Args>
void launch_dependent(void (*kernel)(Parameters...), unsigned ctas, unsigned threads,
                      size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace m3::hopper
