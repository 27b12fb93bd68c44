#define M3_KERNELS_BF16_DOT 0
namespace m3 { namespace { constexpr bool kBf16Dot = M3_KERNELS_BF16_DOT; } }
#include "ops/common/msa_kernels_impl.h"

namespace m3 {
extern const MsaKernels kMsaKernelsPortable = make_table("portable");
}  // namespace m3
