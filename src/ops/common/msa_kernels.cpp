#include "ops/common/msa_kernels.h"

#include "base/cpu_features.h"

namespace m3 {

alignas(64) const uint32_t kMsaZeroRow[kMsaMaxDim] = {};

const MsaKernels& msa_kernels(bool bf16_dot) {
  switch (cpu_isa()) {
#if defined(__x86_64__)
    case CpuIsa::kAvx512Bf16: return bf16_dot && cpu_bf16_dot_preferred() ? kMsaKernelsAvx512Bf16 : kMsaKernelsAvx512;
    case CpuIsa::kAvx512: return kMsaKernelsAvx512;
    case CpuIsa::kAvx2: return kMsaKernelsAvx2;
#endif
    default: return kMsaKernelsPortable;
  }
}

}  // namespace m3
