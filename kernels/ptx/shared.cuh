// Loads and stores of shared memory by its 32-bit addresses.
#pragma once
#include <stdint.h>

namespace fm {

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
__device__ __forceinline__ uint4 load_shared_4(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
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
