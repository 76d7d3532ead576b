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

// Stores to shared memory of any CTA of the cluster, which has begun; the bytes count at a barrier there (PTX ISA, st.async).
__device__ __forceinline__ void store_cluster(uint32_t to, uint2 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(v.x),
               "r"(v.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_cluster(uint32_t to, uint4 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}

// Sends what lies at two addresses, `bytes` of each, a multiple of 16, to the same places in another CTA, by one lane of a whole warp, and
// arrives at a barrier that counts as many from there, where these are counted on the same barrier (PTX ISA, cp.async.bulk). Operands
// are the same for all lanes, which the compiler has to see.
__device__ __forceinline__ void send_to_pair(uint32_t first, uint32_t second, uint32_t bytes, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      ".reg .b32 to, there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%4], %3;\n"
      "mapa.shared::cluster.u32 to, %0, %5;\n"
      "@one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %2, [there];\n"
      "mapa.shared::cluster.u32 to, %1, %5;\n"
      "@one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [there];\n"
      "}" ::"r"(first),
      "r"(second), "r"(bytes), "r"(2 * bytes), "r"(barrier), "r"(rank)
      : "memory");
}

// Sends `bytes`, a multiple of 16, to another place in CTA `rank`, by one lane of a whole warp; they count at a barrier there that expects
// them. Operands are the same for all lanes, as above.
__device__ __forceinline__ void send_part(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      ".reg .b32 at, there;\n"
      "mapa.shared::cluster.u32 there, %3, %4;\n"
      "mapa.shared::cluster.u32 at, %0, %4;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [at], [%1], %2, [there];\n"
      "}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
      : "memory");
}

__device__ __forceinline__ uint2 load_cluster_2(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_cluster_4(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// Arrives at a barrier of any CTA of the cluster: what this thread wrote to shared memory before is visible to who waits for it there.
// Restricted to shared memory (PTX ISA, fence.sync_restrict), as an arrival that releases at cluster scope waits for global memory, too.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t cluster_barrier) {
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier)
      : "memory");
}

// Waits for such arrivals at a barrier of this CTA.
__device__ __forceinline__ void mbarrier_wait_acquire_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fm
