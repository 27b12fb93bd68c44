// Vectors of 4 lanes, no fused multiply-add.
#include "ops/gemm/gemm_tiles.h"

namespace m3 {

const GemmKernel kGemmPortable = make_gemm_kernel<DotF32<3>>();

}  // namespace m3
