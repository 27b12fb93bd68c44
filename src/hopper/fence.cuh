// Ordering between ordinary accesses and the asynchronous engines (copy engine, wgmma), named
// barriers, register redistribution and programmatic dependent launch.
#pragma once
#include <cstdint>

namespace m3::hopper {

// Ordinary stores to shared memory before it are seen by wgmma and bulk copies after it. Each
// writing thread calls it before the barrier that hands the data over.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier `id` (1..15; 0 is __syncthreads) over num_threads threads, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t num_threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Arrives without waiting; num_threads counts arriving and waiting threads together.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t num_threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Registers per thread of the executing warpgroup; multiples of 8, 24..256. Needs
// __launch_bounds__(threads, 1) and one role per branch of a single if/else.
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in exactly one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Programmatic dependent launch: waits for the results of the grid before, ...
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ... and lets the next grid start early.
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace m3::hopper
