// The build without CUDA.
#include <cstring>

#include "base/check.h"
#include "tensor/device.h"

namespace m3 {

int num_cuda_devices() { return 0; }
std::string cuda_unavailable_reason() {
  return "this build has no GPU code (M3_CUDA=OFF); build the preset 'hopper'";
}
std::string cuda_device_description(int) { M3_FAIL("{}", cuda_unavailable_reason()); }
void* device_malloc(int64_t, Device device) { M3_FAIL("{}: {}", device.str(), cuda_unavailable_reason()); }
void device_free(void*, Device) noexcept {}

void copy(const Tensor& from, const Tensor& to, Stream) {
  M3_CHECK(from.shape() == to.shape() && from.dtype() == to.dtype(), "copy of {} {} to {} {}",
           dtype_name(from.dtype()), from.shape().str(), dtype_name(to.dtype()), to.shape().str());
  M3_CHECK(from.device().is_cpu() && to.device().is_cpu(), "copy from {} to {}: {}",
           from.device().str(), to.device().str(), cuda_unavailable_reason());
  if (from.bytes() > 0) std::memmove(to.data(), from.data(), from.bytes());
}
void synchronize(Stream, Device) {}

}  // namespace m3
