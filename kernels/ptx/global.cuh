// Loads from global memory that say how they are cached or ordered, stores that say how long the L2 keeps them, and atomic operations there.
#pragma once
#include <stdint.h>

namespace fm {

// How long the L2 keeps what is read or written: before anything else it lets go what nobody reads again, and last of all what will be
// read soon (what createpolicy gives for evict_first and evict_last). The first is as without a policy, as measured.
constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;

// Loads that are volatile so that a second read does not keep the first one's registers alive. None is `.nc`: as what such a load
// reads never changes, the assembler moves it ahead of the wait for earlier launches, which may still write it. Early ones are for
// what is read while these may be running: past the L1, which would keep it.
template <bool Early = false>
__device__ __forceinline__ int load_once(const int* at) {
  int v;
  if (Early)
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at));
  else
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ float load_once(const float* at) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ uint4 load_once(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
__device__ __forceinline__ uint2 load_once(const uint2* at) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}
template <bool Early = false>
__device__ __forceinline__ int4 load_once(const int4* at) {
  int4 v;
  if (Early)
    asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  else
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// An entry, or -1 where none is to be loaded. Without a branch: where two ways meet the compiler may wait for the load.
__device__ __forceinline__ int load_entry(const int* at, bool here) {
  int v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.s32 %0, -1;\n"
      "@p ld.global.s32 %0, [%1];\n"
      "}"
      : "=r"(v)
      : "l"(at), "r"((uint32_t)here));
  return v;
}

// Loads `At` bytes on from an address. What is on its way must not be copied from register to register, where branches
// meet, say: that waits for it.
template <int At = 0>
__device__ __forceinline__ uint4 load_16(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "n"(At));
  return v;
}
template <int At = 0>
__device__ __forceinline__ void load_8(uint2& v, const uint8_t* from) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2+%3];" : "=r"(v.x), "=r"(v.y) : "l"(from), "n"(At));
}
template <int At = 0>
__device__ __forceinline__ void load_8(uint64_t& v, const uint8_t* from) {
  asm volatile("ld.global.L1::no_allocate.u64 %0, [%1+%2];" : "=l"(v) : "l"(from), "n"(At));
}
template <int At = 0>
__device__ __forceinline__ uint32_t load_4(const uint8_t* from) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1+%2];" : "=r"(v) : "l"(from), "n"(At));
  return v;
}
// Where `present`; else v stays as it is.
template <int At = 0>
__device__ __forceinline__ void load_16_if(bool present, uint4& v, const uint8_t* from) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %6, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4+%5];\n"
      "}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "n"(At), "r"((uint32_t)present));
}

// Of words that CTAs have in common, for the whole GPU: relaxed ones. What changes a word returns what was there.
__device__ __forceinline__ int atomic_add(int* to, int v) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(v) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t atomic_add(uint64_t* to, uint64_t v) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(v) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_relaxed(const int* from) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// Those that acquire: what was written before who wrote the word, released, is visible after them.
__device__ __forceinline__ uint64_t atomic_add_acquire(uint64_t* to, uint64_t v) {
  uint64_t before;
  asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(v) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_acquire(const int* from) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t compare_and_swap(uint64_t* at, uint64_t expected, uint64_t desired) {
  uint64_t before;
  asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(at), "l"(expected), "l"(desired)
               : "memory");
  return before;
}
// Subtracts from a word, sets its bits, and turns them, without waiting for what it was.
__device__ __forceinline__ void subtract(uint64_t* from, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(from), "l"(0 - v) : "memory");
}
__device__ __forceinline__ void set_bits(uint64_t* at, uint64_t bits) {
  asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}
__device__ __forceinline__ void turn_bits(int* at, uint32_t bits) {
  asm volatile("red.relaxed.gpu.global.xor.b32 [%0], %1;" ::"l"(at), "r"(bits) : "memory");
}

// Raises a number in memory to `v`, if that is larger. By its bits: those of positive numbers ascend as integers do, those of negative ones
// as unsigned ones descend.
__device__ __forceinline__ void raise(float* at, float v) {
  if (__float_as_uint(v) >> 31)
    asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(at), "r"(__float_as_uint(v)) : "memory");
  else
    asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(at), "r"(__float_as_uint(v)) : "memory");
}

// Four numbers that will be read soon.
__device__ __forceinline__ void store_kept(float4* to, float4 v) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
               "l"(kEvictLast)
               : "memory");
}
// The L2 keeps them as long as `policy` says.
__device__ __forceinline__ void store_by(uint64_t policy, uint4* to, uint4 v) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}
// A line of 128 bytes, at a multiple of as many, holds anything from now on: the L2 need not write it to memory.
__device__ __forceinline__ void discard_line(void* line) { asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory"); }

}  // namespace fm
