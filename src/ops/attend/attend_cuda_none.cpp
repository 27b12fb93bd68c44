#include "ops/attend/attend_cuda.h"

namespace m3 {
namespace {
[[noreturn]] void absent() {
  M3_FAIL("attend on a GPU: this binary was built without CUDA (M3_CUDA=ON)");
}
}  // namespace

const char* attend_path_name(AttendPath) {
  return "absent";
}
AttendPath attend_cuda_path(const MsaGeometry&, const MsaBatch&, const AttendSupport&, DType, DType,
                            DType) {
  absent();
}
int64_t attend_cuda_workspace_bytes(const MsaGeometry&, const MsaBatch&, const AttendSupport&) {
  absent();
}
void attend_cuda(const AttendCudaArgs&, AttendPath, Stream) {
  absent();
}

}  // namespace m3
