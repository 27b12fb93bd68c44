// Device memory and copies over the CUDA runtime (linked statically; the driver is found at run time).
#include <cuda_runtime.h>

#include <cstring>

#include "base/check.h"
#include "base/progress.h"
#include "tensor/cuda_check.h"
#include "tensor/device.h"

namespace m3 {

int num_cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // the failed query must not surface in a later call
    return 0;
  }
  return count;
}

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count > 0 ? "" : "the driver reports no device";
}

std::string cuda_device_description(int index) {
  cudaDeviceProp prop = {};
  M3_CUDA_CHECK(cudaGetDeviceProperties(&prop, index));
  int driver = 0;
  M3_CUDA_CHECK(cudaDriverGetVersion(&driver));
  return fmt::format("{}, {} SMs, {}, CUDA driver {}.{}", prop.name, prop.multiProcessorCount,
                     format_bytes(static_cast<double>(prop.totalGlobalMem)), driver / 1000,
                     driver % 1000 / 10);
}

void* device_malloc(int64_t bytes, Device device) {
  M3_CUDA_CHECK(cudaSetDevice(device.index));
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status != cudaSuccess) {
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    M3_FAIL("{}: cannot allocate {} ({} of {} free): {}", device.str(),
            format_bytes(static_cast<double>(bytes)), format_bytes(static_cast<double>(free_bytes)),
            format_bytes(static_cast<double>(total_bytes)), cudaGetErrorString(status));
  }
  return data;
}

void device_free(void* data, Device) noexcept { cudaFree(data); }

void copy(const Tensor& from, const Tensor& to, Stream stream) {
  M3_CHECK(from.shape() == to.shape() && from.dtype() == to.dtype(), "copy of {} {} to {} {}",
           dtype_name(from.dtype()), from.shape().str(), dtype_name(to.dtype()), to.shape().str());
  if (from.bytes() == 0) return;
  if (from.device().is_cpu() && to.device().is_cpu()) {
    std::memmove(to.data(), from.data(), from.bytes());
    return;
  }
  M3_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDefault,
                                static_cast<cudaStream_t>(stream.handle)));
}

void synchronize(Stream stream, Device device) {
  if (device.is_cpu()) return;
  M3_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)));
}

}  // namespace m3
