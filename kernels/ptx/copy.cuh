// Asynchronous copies from global to shared memory: TMA boxes and 16-byte cp.async.
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "global.cuh"

namespace fm {

// One 5-D box of a tensor map, counted in bytes on an mbarrier (PTX ISA, cp.async.bulk.tensor). What lies
// outside the tensor arrives as zeros. `policy`: of the L2 (global.cuh).
__device__ __forceinline__ void tma_load_5d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int c0,
                                            int c1, int c2, int c3, int c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// Asks the L2 for a box.
__device__ __forceinline__ void tma_prefetch_5d(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// A 3-D box.
__device__ __forceinline__ void tma_load_3d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int c0,
                                            int c1, int c2, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

// A 4-D box.
__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int c0,
                                            int c1, int c2, int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

// The same box to the same place in every CTA whose bit is set in `ctas`, counted on each one's own barrier.
__device__ __forceinline__ void tma_multicast_5d(uint32_t destination, const CUtensorMap* map, uint32_t barrier,
                                                 uint16_t ctas, int c0, int c1, int c2, int c3, int c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3, %9;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(ctas), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// A 3-D box, in the same way.
__device__ __forceinline__ void tma_multicast_3d(uint32_t destination, const CUtensorMap* map, uint32_t barrier,
                                                 uint16_t ctas, int c0, int c1, int c2, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6}], [%2], %3, %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(ctas), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

// Bytes, a multiple of 16 between addresses that are, counted on an mbarrier (PTX ISA, cp.async.bulk).
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same bytes to the same place in every CTA whose bit is set in `ctas`, counted on each one's own barrier.
__device__ __forceinline__ void bulk_multicast(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                                               uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier), "h"(ctas)
      : "memory");
}

// Four of them, to places `step` apart, by one lane of a whole warp. Operands are the same for all lanes, which the compiler
// has to see: else it makes a loop over the lanes of each copy.
template <uint32_t Bytes>
__device__ __forceinline__ void bulk_load_four(uint32_t to, uint32_t step, const uint64_t (&from)[4], uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%4], %8, [%9];\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%1], [%5], %8, [%9];\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%6], %8, [%9];\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%3], [%7], %8, [%9];\n"
      "}" ::"r"(to),
      "r"(to + step), "r"(to + 2 * step), "r"(to + 3 * step), "l"(from[0]), "l"(from[1]), "l"(from[2]), "l"(from[3]),
      "n"(Bytes), "r"(barrier)
      : "memory");
}

// Asks the L2 for the line that holds an address.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// 16 bytes, or zeros when `present` is false (nothing is read then).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(present ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_8(uint32_t destination, const void* source, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(present ? 8 : 0) : "memory");
}

// The same without a condition, and of 8 bytes.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void cp_async_8(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace fm
