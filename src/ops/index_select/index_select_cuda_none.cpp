#include "ops/index_select/index_select_cuda.h"

namespace m3 {
namespace {
[[noreturn]] void absent() {
  M3_FAIL("index_select on a GPU: this binary was built without CUDA (M3_CUDA=ON)");
}
}  // namespace

const char* index_select_path_name(IndexSelectPath) {
  return "absent";
}
IndexSelectPath index_select_cuda_path(const MsaGeometry&, const MsaBatch&,
                                       const IndexSelectOptions&, DType, DType) {
  absent();
}
int64_t index_select_cuda_workspace_bytes(const MsaGeometry&, const MsaBatch&) {
  absent();
}
void index_select_cuda(const IndexSelectCudaArgs&, IndexSelectPath, Stream) {
  absent();
}

}  // namespace m3
