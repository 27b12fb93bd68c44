#include "hopper/tensor_map.h"

#include <cuda_runtime.h>

#include "tensor/cuda_check.h"

namespace m3::hopper {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  M3_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                 cudaEnableDefault, &result));
  M3_CHECK(result == cudaDriverEntryPointSuccess && function != nullptr,
           "the driver has no cuTensorMapEncodeTiled (query result {}); a driver for CUDA 12 or "
           "later is needed",
           static_cast<int>(result));
  return reinterpret_cast<EncodeTiled>(function);
}

CUtensorMapSwizzle driver_swizzle(MapSwizzle swizzle) {
  switch (swizzle) {
    case MapSwizzle::kNone:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
    case MapSwizzle::k32Bytes:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case MapSwizzle::k64Bytes:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case MapSwizzle::k128Bytes:
      return CU_TENSOR_MAP_SWIZZLE_128B;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

CUtensorMap tensor_map_create(const void* global, CUtensorMapDataType element_type,
                              std::initializer_list<MapAxis> axes, MapSwizzle swizzle) {
  static const EncodeTiled encode = find_encoder();
  const int rank = static_cast<int>(axes.size());
  M3_CHECK(rank >= 1 && rank <= 5, "tensor map with {} axes, want 1 to 5", rank);
  cuuint64_t extents[5] = {}, strides[5] = {};
  cuuint32_t box[5] = {}, element_strides[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank; ++i) {
    const MapAxis& axis = axes.begin()[i];
    extents[i] = static_cast<cuuint64_t>(axis.extent);
    box[i] = static_cast<cuuint32_t>(axis.box);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(axis.stride_bytes);
  }
  CUtensorMap map;
  const CUresult status =
      encode(&map, element_type, static_cast<cuuint32_t>(rank), const_cast<void*>(global), extents,
             strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, driver_swizzle(swizzle),
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  M3_CHECK(
      status == CUDA_SUCCESS,
      "cuTensorMapEncodeTiled failed with code {} (rank {}, innermost extent {}, box {}, base {})",
      static_cast<int>(status), rank, axes.begin()[0].extent, axes.begin()[0].box, global);
  return map;
}

}  // namespace m3::hopper
