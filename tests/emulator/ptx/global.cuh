// As kernels/ptx/global.cuh.
#pragma once
#include "language/language.h"

namespace fm {

constexpr uint64_t kEvictNormal = 0, kEvictFirst = 0, kEvictLast = 0;

template <bool Early = false>
int load_once(const int* at) {
  if (!Early) emulation::require_earlier_launches();
  return *at;
}
template <bool Early = false>
int4 load_once(const int4* at) {
  if (!Early) emulation::require_earlier_launches();
  return *at;
}
template <class T>
T load_once(const T* at) {
  emulation::require_earlier_launches();
  return *at;
}
inline int load_entry(const int* at, bool here) {
  emulation::require_earlier_launches();
  return here ? *at : -1;
}

template <class T>
T loaded(const uint8_t* from) {
  emulation::require_earlier_launches();
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) emulation::fail("a global address is not aligned");
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <int At = 0>
uint4 load_16(const uint8_t* from) {
  return loaded<uint4>(from + At);
}
template <int At = 0>
void load_8(uint2& v, const uint8_t* from) {
  v = loaded<uint2>(from + At);
}
template <int At = 0>
void load_8(uint64_t& v, const uint8_t* from) {
  v = loaded<uint64_t>(from + At);
}
template <int At = 0>
uint32_t load_4(const uint8_t* from) {
  return loaded<uint32_t>(from + At);
}
template <int At = 0>
void load_16_if(bool present, uint4& v, const uint8_t* from) {
  if (present) v = loaded<uint4>(from + At);
}

inline void store_kept(float4* to, float4 v) { *to = v; }
inline void store_by(uint64_t, uint4* to, uint4 v) { *to = v; }
// What lies there afterwards: NaN.
inline void discard_line(void* line) {
  if (reinterpret_cast<uintptr_t>(line) % 128 != 0) emulation::fail("a line that is discarded is not aligned");
  std::memset(line, 0xff, 128);
}

inline uint32_t load_relaxed(const int* at) {
  emulation::yield("a look at global memory");
  return *at;
}
inline uint64_t load_relaxed(const uint64_t* at) {
  emulation::yield("a look at global memory");
  return *at;
}
inline uint64_t load_acquire(const uint64_t* at) { return load_relaxed(at); }
inline uint32_t load_acquire(const int* at) { return load_relaxed(at); }
inline void subtract(uint64_t* from, uint64_t v) { *from -= v; }
inline void set_bits(uint64_t* at, uint64_t bits) { *at |= bits; }
inline void turn_bits(int* at, uint32_t bits) { *at ^= bits; }
inline uint64_t atomic_add(uint64_t* at, uint64_t v) {
  const uint64_t before = *at;
  *at += v;
  return before;
}
inline uint64_t atomic_add_acquire(uint64_t* at, uint64_t v) { return atomic_add(at, v); }
inline int atomic_add(int* at, int v) {
  const int before = *at;
  *at += v;
  return before;
}
inline uint64_t compare_and_swap(uint64_t* at, uint64_t expected, uint64_t desired) {
  const uint64_t before = *at;
  if (before == expected) *at = desired;
  return before;
}
inline void raise(float* at, float v) {
  const uint32_t bits = __float_as_uint(v), there = __float_as_uint(*at);
  if (bits >> 31 ? bits < there : int32_t(bits) > int32_t(there)) *at = v;
}

}  // namespace fm
