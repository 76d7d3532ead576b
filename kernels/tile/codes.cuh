// Codes of quantised caches to 16-bit numbers: e4m3 (OCP float8_e4m3fn) and e2m1, times a scale that makes them exact.
//
// A code's bits are put where a bfloat16 has its exponent and fraction. That number is the code's value times a power
// of two, subnormal codes included, since bfloat16 has subnormals too: one exact multiplication gives value x scale, where
// the scale is a power of two (or has so few bits that the product has at most eight).
#pragma once
#include <stdint.h>

#include "../ptx/math.cuh"

namespace fm {

// What a pair of placed e4m3 codes is multiplied with to give their values: 2^120, and for e2m1 2^126.
constexpr uint32_t kE4m3Unit = 0x7B807B80u;
constexpr uint32_t kE2m1Unit = 0x7E807E80u;
constexpr int kMostScale = 134;  // the highest UE8M0 scale that one multiplication applies

__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Two e4m3 codes, bytes 0 and 1 or (`High`) 2 and 3 of a word, as bfloat16 numbers 2^-120 of their values. NaN codes
// become 480.
template <bool High>
__device__ __forceinline__ uint32_t place_e4m3(uint32_t codes) {
  const uint32_t v = __byte_perm(codes, 0, High ? 0x3424 : 0x1404);  // each code in the upper byte of a half
  return (v >> 4 & 0x07F007F0u) | (v & 0x80008000u);
}

// Has some bit of 0x80808080 set where any of sixteen e4m3 codes is NaN: all bits but the sign.
__device__ __forceinline__ uint32_t nan_bits(uint4 c) {
  constexpr uint32_t kBits = 0x7F7F7F7Fu, kOne = 0x01010101u;
  return ((c.x & kBits) + kOne) | ((c.y & kBits) + kOne) | ((c.z & kBits) + kOne) | ((c.w & kBits) + kOne);
}

// NaN for each half that place_e4m3 made of a NaN code.
__device__ __forceinline__ uint32_t nan_where(uint32_t placed) {
  return ((placed & 0x07F0u) == 0x07F0u ? 0x7FFFu : 0) | ((placed & 0x07F00000u) == 0x07F00000u ? 0x7FFF0000u : 0);
}

// Sixteen values in order, as two pieces of 16 bytes.
struct Values16 {
  uint4 piece[2];
};

template <class Convert>
__device__ __forceinline__ Values16 convert_words(uint4 c, Convert convert) {
  const uint2 a = convert(c.x), b = convert(c.y), d = convert(c.z), e = convert(c.w);
  return {{make_uint4(a.x, a.y, b.x, b.y), make_uint4(d.x, d.y, e.x, e.y)}};
}

// Sixteen e4m3 codes; `unit` is a pair of bfloat16: kE4m3Unit, or that times a power of two.
__device__ __forceinline__ Values16 e4m3_values(__nv_bfloat16, uint4 codes, uint32_t unit) {
  return convert_words(codes, [&](uint32_t w) {
    return make_uint2(multiply_pair(place_e4m3<false>(w), unit), multiply_pair(place_e4m3<true>(w), unit));
  });
}

// The same where there are NaN codes.
__device__ __forceinline__ Values16 e4m3_values_with_nan(uint4 codes, uint32_t unit) {
  return convert_words(codes, [&](uint32_t w) {
    const uint32_t low = place_e4m3<false>(w), high = place_e4m3<true>(w);
    return make_uint2(multiply_pair(low, unit) | nan_where(low), multiply_pair(high, unit) | nan_where(high));
  });
}

__device__ __forceinline__ Values16 e4m3_values(__half, uint4 codes, uint32_t) {
  return convert_words(codes, [](uint32_t w) {
    uint2 v;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(v.x), "=r"(v.y)
        : "r"(w));
    return v;
  });
}

// Sixteen e4m3 codes, NaN or not.
__device__ __forceinline__ Values16 e4m3_values_and_nan(__nv_bfloat16, uint4 codes) {
  return e4m3_values_with_nan(codes, kE4m3Unit);
}
__device__ __forceinline__ Values16 e4m3_values_and_nan(__half t, uint4 codes) { return e4m3_values(t, codes, 0); }

// The pair of bfloat16 that placed e4m3 codes are multiplied with for a UE8M0 scale up to kMostScale.
__device__ __forceinline__ uint32_t unit_of_scale(uint32_t exponent) {
  const uint32_t bits = (min(exponent, (uint32_t)kMostScale) + 120) << 7;
  return bits | bits << 16;
}

// What is left of a scale beyond kMostScale.
__device__ __forceinline__ Values16 scale_on(Values16 v, uint32_t exponent) {
  const uint32_t bits = (exponent - kMostScale + 127) << 7, factor = bits | bits << 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v.piece[i].x = multiply_pair(v.piece[i].x, factor), v.piece[i].y = multiply_pair(v.piece[i].y, factor);
    v.piece[i].z = multiply_pair(v.piece[i].z, factor), v.piece[i].w = multiply_pair(v.piece[i].w, factor);
  }
  return v;
}

// Sixteen e2m1 codes, the first in the lowest bits, times an e4m3 scale.
__device__ __forceinline__ Values16 e2m1_values(uint2 codes, uint32_t scale_code) {
  const uint32_t both = scale_code | scale_code << 8, placed = place_e4m3<false>(both);
  const uint32_t scale = multiply_pair(placed, kE4m3Unit) | nan_where(placed);
  const auto pair = [&](uint32_t w, int i) {
    const uint32_t two = w >> 8 * i, v = (two & 0xFu) | (two << 12 & 0xF0000u);  // one in the lowest bits of each half
    return multiply_pair(multiply_pair((v & 0x00070007u) << 6 | (v & 0x00080008u) << 12, kE2m1Unit), scale);
  };
  const auto eight = [&](uint32_t w) { return make_uint4(pair(w, 0), pair(w, 1), pair(w, 2), pair(w, 3)); };
  return {{eight(codes.x), eight(codes.y)}};
}

}  // namespace fm
