#include "ops/common/tile_gemm_impl.h"

namespace m3 {
extern const TileKernels kTilePortable = kTable;
}  // namespace m3
