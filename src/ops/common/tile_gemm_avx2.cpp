#include "ops/common/tile_gemm_impl.h"

namespace m3 {
extern const TileKernels kTileAvx2 = kTable;
}  // namespace m3
