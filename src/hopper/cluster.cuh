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
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// shared::cluster address of the same variable in CTA `cta_rank`.
__device__ __forceinline__ uint32_t cluster_address(const void* smem, uint32_t cta_rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(smem)), "r"(cta_rank));
  return address;
}

__device__ __forceinline__ uint32_t cluster_load_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// A pair or four floats; the address is a multiple of 8 or 16.
__device__ __forceinline__ float2 cluster_load_f32x2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float4 cluster_load_f32x4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void cluster_store_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace m3::hopper
