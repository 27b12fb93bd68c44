#define M3_KERNELS_BF16_DOT 0
#include "ops/common/msa_kernels_impl.h"

namespace m3 {
extern const MsaKernels kMsaKernelsPortable = make_table("portable");
}  // namespace m3
