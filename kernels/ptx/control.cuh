// Barriers, fences, register allocation.
#pragma once
#include <stdint.h>

namespace fm {

// This thread within its CTA. Read anew each time: cheaper than a register held across a main loop.
__device__ __forceinline__ int block_thread() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
// And within its warpgroup.
__device__ __forceinline__ int warpgroup_thread() { return (unsigned)block_thread() % 128; }

// The same value, of which the compiler knows nothing: what is computed from it stays where it is written.
__device__ __forceinline__ int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// The same value, by a whole warp whose lanes all have it, which the compiler sees then: descriptors from it stay in uniform
// registers instead of being moved there one by one.
__device__ __forceinline__ uint32_t uniform(uint32_t v) { return __shfl_sync(~0u, v, 0); }

// A named barrier among `threads` threads of the CTA.
template <int Id, int Threads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}

// Arrives at one without waiting.
template <int Id, int Threads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}

// The same with a barrier of a number known at run time.
__device__ __forceinline__ void named_barrier_of_warpgroup(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// The same, and whether the predicate holds for any of them.
__device__ __forceinline__ bool named_barrier_any_of_warpgroup(int id, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "barrier.cta.red.or.pred p, %2, 128, p;\n"
      "selp.s32 %0, 1, 0, p;\n"
      "}"
      : "=r"(any)
      : "r"((int)predicate), "r"(id)
      : "memory");
  return any;
}
template <int Id, int Threads>
__device__ __forceinline__ bool named_barrier_any(bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "barrier.cta.red.or.pred p, %2, %3, p;\n"
      "selp.s32 %0, 1, 0, p;\n"
      "}"
      : "=r"(any)
      : "r"((int)predicate), "n"(Id), "n"(Threads)
      : "memory");
  return any;
}

// Makes this thread's ordinary shared-memory writes visible to wgmma and TMA; a barrier must follow.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The team of this CTA, and its place within: the grid's dimensions.
__device__ __forceinline__ int team_index() {
  int v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ int cta_of_team() {
  int v;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(v));
  return v;
}

// CTAs of this CTA's cluster (1 when launched without), and this CTA's place among them. Read anew each time, too.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(v));
  return v;
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}
// A barrier of all threads of the cluster in two steps, without an order of memory accesses: that is up to fences before it.
__device__ __forceinline__ void cluster_barrier_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier_relaxed() {
  cluster_barrier_arrive();
  cluster_barrier_wait();
}

template <int Registers>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Orders memory accesses of this thread, and what it has seen of others, for the whole GPU.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace fm
