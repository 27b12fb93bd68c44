// Devices. Without CUDA (device_cuda_none.cpp) num_cuda_devices() is 0 and the rest throws; the binary that
// has CUDA also starts, and answers 0, on a machine without a driver.
#pragma once
#include <cstdint>
#include <string>

#include "tensor/tensor.h"

namespace m3 {

// A CUDA stream by its handle; the default is the default stream, and means nothing on the CPU.
struct Stream {
  void* handle = nullptr;
};

int num_cuda_devices();
std::string cuda_unavailable_reason();  // empty if there is a device
std::string cuda_device_description(int index);  // "NVIDIA H200, 132 SMs, 139.7 GiB, driver 13.0"

void* device_malloc(int64_t bytes, Device device);
void device_free(void* data, Device device) noexcept;

// Copies between any two devices; the shapes and types must be equal. Asynchronous on the stream when
// a GPU takes part.
void copy(const Tensor& from, const Tensor& to, Stream stream = {});
void synchronize(Stream stream, Device device);

}  // namespace m3
