// As kernels/ptx/control.cuh.
#pragma once
#include "language/language.h"
#include "launch.cuh"

namespace fm {

inline int block_thread() { return emulation::thread_number(); }
inline int warpgroup_thread() { return emulation::thread_number() % 128; }
inline int opaque(int v) { return v; }
inline uint32_t uniform(uint32_t v) { return __shfl_sync(~0u, v, 0); }

template <int Id, int Threads>
void named_barrier() {
  emulation::meet(emulation::cta().barriers[Id], Threads, false, true, "bar.sync");
}
template <int Id, int Threads>
void named_barrier_arrive() {
  emulation::meet(emulation::cta().barriers[Id], Threads, false, false, "bar.arrive");
}
inline void named_barrier_of_warpgroup(int id) { emulation::meet(emulation::cta().barriers[id], 128, false, true, "bar.sync"); }
inline bool named_barrier_any_of_warpgroup(int id, bool predicate) {
  return emulation::meet(emulation::cta().barriers[id], 128, predicate, true, "barrier.red") != 0;
}
template <int Id, int Threads>
bool named_barrier_any(bool predicate) {
  return emulation::meet(emulation::cta().barriers[Id], Threads, predicate, true, "barrier.red") != 0;
}

inline void fence_async_shared() {}

inline int team_index() { return emulation::cta().x; }
inline int cta_of_team() { return emulation::cta().y; }
inline uint32_t cluster_size() { return emulation::machine.grid.cluster; }
inline uint32_t cluster_rank() { return emulation::cta().rank; }
inline void cluster_barrier_relaxed() {
  const auto& grid = emulation::machine.grid;
  emulation::meet(emulation::cta().cluster->barrier, grid.threads * grid.cluster, false, true, "barrier.cluster");
}
inline void cluster_barrier_arrive() {}
inline void cluster_barrier_wait() { cluster_barrier_relaxed(); }

template <int Registers>
void registers_grow() {}
template <int Registers>
void registers_shrink() {}

inline void fence_gpu() {}

}  // namespace fm
