// As kernels/ptx/cluster.cuh.
#pragma once
#include "language/language.h"

namespace fm {

inline uint32_t cluster_address(uint32_t address, uint32_t rank) { return emulation::address_in(address, rank); }
inline void store_cluster(uint32_t to, uint2 v, uint32_t barrier) { emulation::store_bytes(to, &v, sizeof v, barrier); }
inline void store_cluster(uint32_t to, uint4 v, uint32_t barrier) { emulation::store_bytes(to, &v, sizeof v, barrier); }
inline void send_to_pair(uint32_t first, uint32_t second, uint32_t bytes, uint32_t barrier, uint32_t rank) {
  __syncwarp();
  if (emulation::self->lane != 0) return;
  emulation::phase_expect(barrier, 2 * bytes);
  for (const uint32_t at : {first, second}) emulation::copy_bytes(at, emulation::shared_at(at, bytes), bytes, barrier, 1u << rank);
}
inline void send_part(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, uint32_t rank) {
  __syncwarp();
  if (emulation::self->lane == 0) emulation::copy_bytes(to, emulation::shared_at(from, bytes), bytes, barrier, 1u << rank);
}
inline uint2 load_cluster_2(uint32_t from) { return emulation::load<uint2>(from); }
inline uint4 load_cluster_4(uint32_t from) { return emulation::load<uint4>(from); }
inline void mbarrier_arrive_release_cluster(uint32_t cluster_barrier) { emulation::phase_arrive(cluster_barrier, 1); }
inline void mbarrier_wait_acquire_cluster(uint32_t barrier, uint32_t parity) { emulation::phase_wait(barrier, parity); }

}  // namespace fm
