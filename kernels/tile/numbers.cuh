// Arithmetic and conversions of single numbers and pairs, of more than one instruction.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../ptx/math.cuh"

namespace fm {

__device__ __forceinline__ void add_scaled(float4& to, float weight, float4 v) {
  to.x += weight * v.x, to.y += weight * v.y, to.z += weight * v.z, to.w += weight * v.w;
}

// Of a power of two whose inverse is a normal number.
__device__ __forceinline__ float inverse_power_of_two(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// As pack, for results: a finite float stays finite (fp16 ends at 65504).
__device__ __forceinline__ uint32_t pack_result(__nv_bfloat16 t, float low, float high) { return pack(t, low, high); }
__device__ __forceinline__ uint32_t pack_result(__half t, float low, float high) {
  auto clamp = [](float x) { return fabsf(x) < __int_as_float(0x7F800000) ? fminf(fmaxf(x, -65504.f), 65504.f) : x; };
  return pack(t, clamp(low), clamp(high));
}

__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}
__device__ __forceinline__ float2 unpack(__half, uint32_t v) { return __half22float2(*reinterpret_cast<__half2*>(&v)); }

// Adds two pairs of halves, each with a weight of its own.
__device__ __forceinline__ void add_pairs(float4& to, float first, uint32_t a, float second, uint32_t b) {
  const float2 x = unpack(__half(), a), y = unpack(__half(), b);
  to.x += first * x.x, to.y += first * x.y, to.z += second * y.x, to.w += second * y.y;
}

// A power of two with which halves are multiplied, as the exponent of a float.
struct HalfScale {
  static constexpr int kTopExponent = 14;  // of the largest of the halves
  // Of numbers up to `top`: the exponent that is stored, and what they are multiplied with before they are rounded.
  static __device__ __forceinline__ uint32_t exponent(float top) {
    return max(__float_as_uint(top) >> 23 & 0xFF, kTopExponent + 1u) - kTopExponent;
  }
  static __device__ __forceinline__ float scale(uint32_t exponent) { return __uint_as_float(exponent << 23); }
  static __device__ __forceinline__ float inverse(uint32_t exponent) { return __uint_as_float(254u - exponent << 23); }
};

// A pair of bfloat16 to float16, finite numbers to finite ones.
__device__ __forceinline__ uint32_t bf16_to_fp16(uint32_t v) {
  const float2 f = unpack(__nv_bfloat16(), v);
  return pack_result(__half(), f.x, f.y);
}

// Infinities and NaNs of a pair become zeros.
__device__ __forceinline__ uint32_t finite_or_zero(__nv_bfloat16, uint32_t v) {
  uint32_t keep = ((v & 0x7F80u) != 0x7F80u ? 0xFFFFu : 0) | ((v & 0x7F800000u) != 0x7F800000u ? 0xFFFF0000u : 0);
  return v & keep;
}
__device__ __forceinline__ uint32_t finite_or_zero(__half, uint32_t v) {
  uint32_t keep = ((v & 0x7C00u) != 0x7C00u ? 0xFFFFu : 0) | ((v & 0x7C000000u) != 0x7C000000u ? 0xFFFF0000u : 0);
  return v & keep;
}

}  // namespace fm
