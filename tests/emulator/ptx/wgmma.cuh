// As kernels/ptx/wgmma.cuh.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "language/language.h"

namespace fm {

inline uint64_t smem_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::products_commit(); }
template <int Pending>
void wgmma_wait() {
  emulation::products_wait(Pending);
}

// A product of N columns: D has N / 2 numbers of each thread.
template <class T, int D>
void ask_for_product(T, float (&d)[D], const uint32_t* fragment, uint64_t a, uint64_t b, bool accumulate, bool a_transposed,
                     bool b_transposed) {
  emulation::Product p{};
  p.columns = 2 * D, p.half = std::is_same<T, __half>::value, p.a_in_registers = fragment != nullptr;
  p.a_transposed = a_transposed, p.b_transposed = b_transposed, p.accumulate = accumulate, p.a = a, p.b = b;
  emulation::product(p, d, fragment);
}

template <class T>
void wgmma_ss_n64(T t, float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  ask_for_product(t, d, nullptr, a, b, accumulate, false, false);
}
template <class T>
void wgmma_ss_n128_bn(T t, float (&d)[64], uint64_t a, uint64_t b) {
  ask_for_product(t, d, nullptr, a, b, true, false, true);
}
template <int TransA, class T, int D>
void wgmma_ss_few(T t, float (&d)[D], uint64_t a, uint64_t b, bool accumulate) {
  ask_for_product(t, d, nullptr, a, b, accumulate, TransA == 1, false);
}
template <class T, int D>
void wgmma_rs(T t, float (&d)[D], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  ask_for_product(t, d, a, 0, b, accumulate, false, false);
}

}  // namespace fm
