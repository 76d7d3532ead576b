// mbarrier: arrival counters in shared memory with phases (PTX ISA, "mbarrier"). A barrier completes a phase
// when its expected arrivals, and the bytes announced by expect_tx, have all come in.
#pragma once
#include <stdint.h>

namespace fm {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy and to other threads, before the CTA synchronises.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// `Count` arrivals at once, for the whole warp, after all its lanes.
template <int Count>
__device__ __forceinline__ void arrive_for_warp(uint32_t barrier) {
  __syncwarp();
  asm volatile(
      "{\n"
      ".reg .b32 lane;\n"
      ".reg .pred first;\n"
      "mov.u32 lane, %%laneid;\n"
      "setp.eq.u32 first, lane, 0;\n"
      "@first mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n"
      "}" ::"r"(barrier),
      "n"(Count)
      : "memory");
}
__device__ __forceinline__ void arrive_once_per_warp(uint32_t barrier) { arrive_for_warp<1>(barrier); }

// This thread's arrival, made when its copies by cp.async so far have landed.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier in another CTA of the cluster. Release at CTA scope: what it orders is only that this CTA has
// read what copies and, of pairs, stores will overwrite, which is in registers or what wgmma_wait has made sure of (and so that bytes
// which came from there have been read there); cluster scope would flush.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Blocks until the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase of the given parity has completed.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

}  // namespace fm
