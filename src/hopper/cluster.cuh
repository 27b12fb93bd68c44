// Thread block clusters: rank, barrier, addresses in another CTA's shared memory.
#pragma once
#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace m3::hopper {

__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster: memory accesses before arrive are seen after wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// shared::cluster address of the same variable in CTA `cta_rank`.
__device__ __forceinline__ uint32_t cluster_address(const void* smem, uint32_t cta_rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(smem_address(smem)), "r"(cta_rank));
  return address;
}

__device__ __forceinline__ uint32_t cluster_load_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void cluster_store_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// The address is a multiple of 8.
__device__ __forceinline__ void cluster_store_f32x2(uint32_t address, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y)
               : "memory");
}

}  // namespace m3::hopper
