// Launches that overlap (programmatic dependent launch). Every kernel waits for earlier launches before it touches what is not
// its own, so that every kernel may be launched while the one before it ends. But for plans: attention kernels read theirs before
// (FirstItem in tile/work.cuh), as kernels that plan let none begin before they end (plan.cu).
#pragma once

namespace fm {

#if defined(__CUDACC__)  // else an emulation has its own
// Lets the next launch of the stream begin, where it may begin early: as CTAs of this one leave room.
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits for the launches before this one, where it has begun early: then what they wrote can be read.
__device__ __forceinline__ void wait_for_earlier_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

// What a kernel begins with that has nothing to do before that.
__device__ __forceinline__ void follow_earlier_launches() {
  let_next_launch_begin();
  wait_for_earlier_launches();
}

}  // namespace fm
