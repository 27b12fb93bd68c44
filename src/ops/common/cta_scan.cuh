// Prefix sums over the 1024 threads of a CTA.
#pragma once

namespace m3 {

// Inclusive sum; scratch: 32 words of shared memory.
__device__ __forceinline__ int cta_scan_1024(int value, int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int sum = scratch[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    scratch[lane] = sum;
  }
  __syncthreads();
  value += warp > 0 ? scratch[warp - 1] : 0;
  __syncthreads();
  return value;
}

}  // namespace m3
