// Copies of 16 bytes from global to shared memory that each thread starts for itself (PTX ISA,
// "cp.async"): for gathers whose rows are too short for a tensor copy, and for layouts it does not
// have. They pass L1 and the registers by. What they write is seen by the thread that waited; others
// need a barrier behind the wait, and wgmma needs fence_async_shared() before that barrier.
#pragma once
#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace m3::hopper {

// Both addresses are multiples of 16.
__device__ __forceinline__ void async_copy_16(void* smem, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(smem)), "l"(global)
               : "memory");
}

// The same, or zeros where `valid` is false: then nothing is read.
__device__ __forceinline__ void async_copy_16_or_zeros(void* smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Closes the group of copies this thread has started since the last commit; it may be empty.
__device__ __forceinline__ void async_copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace m3::hopper
