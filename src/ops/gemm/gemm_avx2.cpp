// 16 registers: 3 x 4 sums, 3 x, 1 w.
#include "ops/gemm/gemm_tiles.h"

namespace m3 {

const GemmKernel kGemmAvx2 = make_gemm_kernel<DotF32<3>>();

}  // namespace m3
