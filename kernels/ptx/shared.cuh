// Shared memory: where it begins, and loads and stores by its 32-bit addresses.
#pragma once
#include <stdint.h>

namespace fm {

// The CTA's shared memory, whose size the launch says. By way of a reference: where the function that declares it returns it,
// the compiler makes other and mostly longer code of what uses it.
__device__ __forceinline__ void find_launch_shared(uint8_t*& begin) {
  extern __shared__ __align__(1024) uint8_t smem[];
  begin = smem;
}
__device__ __forceinline__ uint8_t* launch_shared() {
  uint8_t* begin;
  find_launch_shared(begin);
  return begin;
}

__device__ __forceinline__ float2 load_shared_2(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared_4(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint16_t load_shared_half(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}

// Four 8 x 8 matrices of 16-bit numbers, by whole warps (PTX ISA, ldmatrix). Lane 8 i + r gives the address of row r of
// matrix i.
template <bool Transposed>
__device__ __forceinline__ void load_matrices(uint32_t (&v)[4], uint32_t from) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

// And back: of matrix i this lane has what load_matrices leaves in v[i].
template <bool Transposed>
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if constexpr (Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared_if(bool store, uint32_t to, uint4 v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"r"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((uint32_t)store)
      : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared_if(bool store, uint32_t to, float v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.shared.f32 [%0], %1;\n"
      "}" ::"r"(to),
      "f"(v), "r"((uint32_t)store)
      : "memory");
}
// The low one or two bytes of a word.
template <int Bytes>
__device__ __forceinline__ void store_shared_bytes(uint32_t to, uint32_t v) {
  static_assert(Bytes == 1 || Bytes == 2);
  if (Bytes == 1)
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(v) : "memory");
  else
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((uint16_t)v) : "memory");
}

}  // namespace fm
