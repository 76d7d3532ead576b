// As kernels/ptx/mbarrier.cuh.
#pragma once
#include "language/language.h"

namespace fm {

inline uint32_t shared_address(const void* pointer) { return emulation::shared_address_of(pointer); }
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) { emulation::phase_init(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { emulation::phase_arrive(barrier, 1); }
template <int Count>
void arrive_for_warp(uint32_t barrier) {
  __syncwarp();
  if (emulation::self->lane == 0) emulation::phase_arrive(barrier, Count);
}
inline void arrive_once_per_warp(uint32_t barrier) { arrive_for_warp<1>(barrier); }
inline void arrive_when_copied(uint32_t barrier) { emulation::thread_copies_arrive(barrier); }
inline void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) { emulation::phase_arrive(emulation::address_in(barrier, rank), 1); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) { emulation::phase_expect(barrier, bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { emulation::phase_wait(barrier, parity); }
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) { return emulation::phase_passed(barrier, parity); }

}  // namespace fm
