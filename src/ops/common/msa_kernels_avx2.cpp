#define M3_KERNELS_BF16_DOT 0
#include "ops/common/msa_kernels_impl.h"

namespace m3 {
extern const MsaKernels kMsaKernelsAvx2 = make_table("avx2");
}  // namespace m3
