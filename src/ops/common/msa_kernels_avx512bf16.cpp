#define M3_KERNELS_BF16_DOT 1
#include "ops/common/msa_kernels_impl.h"

namespace m3 {
extern const MsaKernels kMsaKernelsAvx512Bf16 = make_table("avx512bf16");
}  // namespace m3
