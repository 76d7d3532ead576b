// As kernels/ptx/copy.cuh.
#pragma once
#include <cuda.h>

#include "language/language.h"

namespace fm {

inline const emulation::TensorMap& described(const CUtensorMap* map) { return *reinterpret_cast<const emulation::TensorMap*>(map); }

inline void tma_load_3d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, uint64_t) {
  emulation::copy_box(destination, described(map), {c0, c1, c2, 0, 0}, barrier, 0);
}
inline void tma_load_4d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, uint64_t) {
  emulation::copy_box(destination, described(map), {c0, c1, c2, c3, 0}, barrier, 0);
}
inline void tma_load_5d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4, uint64_t) {
  emulation::copy_box(destination, described(map), {c0, c1, c2, c3, c4}, barrier, 0);
}
inline void tma_multicast_5d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, uint16_t ctas, int c0, int c1, int c2,
                             int c3, int c4, uint64_t) {
  emulation::copy_box(destination, described(map), {c0, c1, c2, c3, c4}, barrier, ctas);
}
inline void tma_multicast_3d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, uint16_t ctas, int c0, int c1, int c2, uint64_t) {
  emulation::copy_box(destination, described(map), {c0, c1, c2, 0, 0}, barrier, ctas);
}
inline void tma_prefetch_5d(const CUtensorMap*, int, int, int, int, int) {}

inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  emulation::copy_bytes(destination, source, bytes, barrier, 0);
}
inline void bulk_multicast(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint16_t ctas) {
  emulation::copy_bytes(destination, source, bytes, barrier, ctas);
}
template <uint32_t Bytes>
inline void bulk_load_four(uint32_t to, uint32_t step, const uint64_t (&from)[4], uint32_t barrier) {
  __syncwarp();
  if (emulation::self->lane != 0) return;
  for (int i = 0; i < 4; ++i) bulk_load(to + i * step, reinterpret_cast<const void*>(from[i]), Bytes, barrier);
}

inline void prefetch_l2(const void*) {}

inline void cp_async_16(uint32_t destination, const void* source, bool present) {
  emulation::thread_copy(destination, source, present ? 16 : 0, 16);
}
inline void cp_async_16(uint32_t destination, const void* source) { emulation::thread_copy(destination, source, 16, 16); }
inline void cp_async_8(uint32_t destination, const void* source, bool present) {
  emulation::thread_copy(destination, source, present ? 8 : 0, 8);
}
inline void cp_async_8(uint32_t destination, const void* source) { emulation::thread_copy(destination, source, 8, 8); }
inline void cp_async_commit() { emulation::thread_copies_commit(); }
template <int Pending>
void cp_async_wait() {
  emulation::thread_copies_wait(Pending);
}

}  // namespace fm
