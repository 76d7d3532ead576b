// Single-instruction arithmetic and conversions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace fm {

// 2^x, about 2 ulp; 2^-inf = 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error 2^-22 for x from 0.5 to 2, else relative; -inf of zero. Of normal numbers.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, 1 ulp, of numbers whose inverse is a normal one.
__device__ __forceinline__ float inverse_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same of any number.
__device__ __forceinline__ float inverse_of_any(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to a pair of 16-bit numbers, round to nearest even, `low` in the low half.
__device__ __forceinline__ uint32_t pack(__nv_bfloat16, float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint32_t pack(__half, float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Products of pairs: of halves, and of bfloat16.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Sums of squares of pairs, half by half.
__device__ __forceinline__ uint32_t add_square_bf16(uint32_t sum, uint32_t a) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %1, %2;" : "=r"(r) : "r"(a), "r"(sum));
  return r;
}

// The larger bfloat16 of two pairs, half by half; NaN only where both are.
__device__ __forceinline__ uint32_t larger_bf16_pair(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Four e4m3 codes in order, NaN codes as NaN.
__device__ __forceinline__ uint2 e4m3_to_half(uint32_t codes) {
  uint2 v;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(v.x), "=r"(v.y)
      : "r"(codes));
  return v;
}

// The address `index` times 16 bytes on.
__device__ __forceinline__ const uint8_t* at_sixteenth(const uint8_t* from, uint32_t index) {
  const uint8_t* at;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(at) : "r"(index), "l"(from));
  return at;
}

// Transposes an 8 x 8 matrix of 16-bit numbers held by a warp: lane i has row i / 4, columns 2 (i % 4) + {0, 1}.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

}  // namespace fm
