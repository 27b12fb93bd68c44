// Bulk copies (PTX ISA, "cp.async.bulk"): one thread moves a contiguous piece; addresses and sizes
// are multiples of 16 bytes. Loads complete on an mbarrier; stores and reductions complete by
// groups of the issuing thread. Shared memory written by ordinary stores needs fence_async_shared()
// before a store.
#pragma once
#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace m3::hopper {

// Cache policies of createpolicy.fractional for the whole access.
enum class L2Policy : uint64_t {
  kEvictNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes,
                                          uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(bar))
      : "memory");
}

__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes,
                                          uint64_t* bar, L2Policy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(bar)), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

// The same into every CTA of `cta_mask`, at the same offsets; each one's own barrier counts the
// bytes.
__device__ __forceinline__ void bulk_load_multicast(void* smem, const void* global, uint32_t bytes,
                                                    uint64_t* bar, uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(bar)), "h"(cta_mask)
      : "memory");
}

__device__ __forceinline__ void bulk_prefetch_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(smem_address(smem)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_reduce_add_f32(float* global, const float* smem,
                                                    uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(smem_address(smem)), "r"(bytes)
      : "memory");
}

// Closes the group of stores and reductions this thread has issued since the last commit.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending groups are unfinished: written to global memory, ...
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ... or only read from shared memory, so that the buffer may be reused.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace m3::hopper
