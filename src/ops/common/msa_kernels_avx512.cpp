#define M3_KERNELS_BF16_DOT 0
#include "ops/common/msa_kernels_impl.h"

namespace m3 {
extern const MsaKernels kMsaKernelsAvx512 = make_table("avx512");
}  // namespace m3
