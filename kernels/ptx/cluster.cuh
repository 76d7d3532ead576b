// Shared memory of other CTAs of the cluster (PTX ISA, "shared::cluster").
#pragma once
#include <stdint.h>

namespace fm {

// The address, in CTA `rank` of the cluster, of what lies at `address` in this one.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_cluster(uint32_t to, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_cluster(uint32_t to, float2 value) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(value.x), "f"(value.y) : "memory");
}

// Arrives at a barrier of any CTA of the cluster; what this thread wrote before is visible to who waits for it there.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait_acquire_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fm
