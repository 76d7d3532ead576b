// The words of CUDA C++ that the kernels use, on the host.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "language/numbers.h"
#include "machine/machine.h"

#define __device__
#define __host__
#define __global__ inline
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

struct alignas(8) float2 {
  float x, y;
};
struct float3 {
  float x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

struct Index {
  unsigned (*value)();
  operator unsigned() const { return value(); }
};
struct Index1 {
  Index x;
};

template <class T>
struct Shuffle {
  T value;
  int source;
  T result;
};
template <class T>
T shuffle(const char* instruction, T value, int source) {
  Shuffle<T> own{value, source, value};
  together(instruction, own, [](Shuffle<T>** all) {
    for (int lane = 0; lane < kLanes; ++lane) all[lane]->result = all[all[lane]->source & (kLanes - 1)]->value;
  });
  return own.result;
}

// What all lanes have, to all.
template <class T, class Combine>
T reduce(const char* instruction, T value, Combine combine) {
  together(instruction, value, [&](T** all) {
    T result = *all[0];
    for (int lane = 1; lane < kLanes; ++lane) result = combine(result, *all[lane]);
    for (int lane = 0; lane < kLanes; ++lane) *all[lane] = result;
  });
  return value;
}

}  // namespace emulation

inline const emulation::Index1 threadIdx{{[] { return emulation::thread_number(); }}};
inline const emulation::Index1 blockDim{{[] { return emulation::machine.grid.threads; }}};
inline const emulation::Index1 blockIdx{{[] { return emulation::cta().x; }}};
inline const emulation::Index1 gridDim{{[] { return emulation::machine.grid.x; }}};

// ---- threads of a CTA ----

inline int __syncthreads_count(bool predicate) {
  return emulation::meet(emulation::cta().barriers[0], emulation::machine.grid.threads, predicate, true, "__syncthreads");
}
inline bool __syncthreads_and(bool predicate) { return __syncthreads_count(predicate) == int(emulation::machine.grid.threads); }
inline void __syncthreads() { __syncthreads_count(false); }
inline void __threadfence() {}

// ---- lanes of a warp ----

inline void __syncwarp() {
  int none = 0;
  emulation::together("__syncwarp", none, [](int**) {});
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::shuffle("shfl", value, lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = emulation::self->lane;
  return emulation::shuffle("shfl.up", value, lane >= distance ? lane - distance : lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::shuffle("shfl.bfly", value, emulation::self->lane ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  return emulation::reduce("vote", unsigned(predicate) << emulation::self->lane, [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned, bool predicate) { return __ballot_sync(~0u, predicate) != 0; }
inline bool __all_sync(unsigned, bool predicate) { return __ballot_sync(~0u, !predicate) == 0; }
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return emulation::reduce("redux.add", value, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return emulation::reduce("redux.min", value, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulation::reduce("redux.max", value, [](unsigned a, unsigned b) { return a < b ? b : a; });
}

// ---- memory ----

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}
inline size_t __cvta_generic_to_shared(const void* pointer) { return emulation::shared_address_of(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return emulation::shared_at(address, 1); }
inline unsigned atomicOr(unsigned* word, unsigned bits) {
  const unsigned before = *word;
  *word |= bits;
  return before;
}

// ---- numbers ----

inline float __uint_as_float(uint32_t bits) { return emulation::bits_as<float>(bits); }
inline float __int_as_float(int32_t bits) { return emulation::bits_as<float>(bits); }
inline uint32_t __float_as_uint(float value) { return emulation::bits_as<uint32_t>(value); }
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __popcll(uint64_t bits) { return __builtin_popcountll(bits); }
inline int __clz(uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __ffs(uint32_t bits) { return __builtin_ffs(int(bits)); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const int which = selector >> 4 * i & 0xF;
    uint32_t byte = bytes >> 8 * (which & 7) & 0xFF;
    if (which & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __log2f(float x) { return std::log2(x); }
inline float __expf(float x) { return std::exp(x); }
inline int64_t clock64() { return emulation::machine.clock += 20; }

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

// As in kernels/ptx/launch.cuh, whose instructions these are: launches come one after another here, and every thread must have
// waited for those before.
namespace fm {

inline void let_next_launch_begin() {}
inline void wait_for_earlier_launches() { emulation::self->has_waited = true; }

}  // namespace fm
