// Tensor maps for tma.cuh, made on the host. The driver's encoder is looked up through the CUDA
// runtime, so nothing links against libcuda and one binary starts without a driver.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <initializer_list>

namespace m3::hopper {

enum class MapSwizzle { kNone, k32Bytes, k64Bytes, k128Bytes };

struct MapAxis {
  int64_t extent;        // elements
  int64_t stride_bytes;  // of one step; multiple of 16; ignored for the innermost axis (contiguous)
  int box;               // elements per copy, 1..256
};

// Axes from the innermost outwards, 1..5. element_type: CU_TENSOR_MAP_DATA_TYPE_*. With a swizzle
// the innermost box spans at most the swizzle's width. Throws Error with the driver's code.
CUtensorMap tensor_map_create(const void* global, CUtensorMapDataType element_type,
                              std::initializer_list<MapAxis> axes, MapSwizzle swizzle);

}  // namespace m3::hopper
