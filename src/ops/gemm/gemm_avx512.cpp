// 32 registers: 6 x 4 sums, 6 x, 1 w.
#include "ops/gemm/gemm_tiles.h"

namespace m3 {

const GemmKernel kGemmAvx512 = make_gemm_kernel<DotF32<6>>();

}  // namespace m3
