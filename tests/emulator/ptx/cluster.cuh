// As kernels/ptx/cluster.cuh.
#pragma once
#include "language/language.h"

namespace fm {

inline uint32_t cluster_address(uint32_t address, uint32_t rank) { return emulation::address_in(address, rank); }
inline float2 load_cluster_2(uint32_t from) { return emulation::load<float2>(from); }
inline float4 load_cluster_4(uint32_t from) { return emulation::load<float4>(from); }
inline void mbarrier_arrive_release_cluster(uint32_t cluster_barrier) { emulation::phase_arrive(cluster_barrier, 1); }
inline void mbarrier_wait_acquire_cluster(uint32_t barrier, uint32_t parity) { emulation::phase_wait(barrier, parity); }

}  // namespace fm
