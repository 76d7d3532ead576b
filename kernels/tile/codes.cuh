// Codes of quantised caches as half-precision numbers: e4m3 (OCP float8_e4m3fn) and e2m1. Every code is a half, and so
// is its product with a power of two in the middle of half's range; with other scales the product is rounded.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "../ptx/math.cuh"
#include "numbers.cuh"

namespace fm {

// Eight e4m3 codes: 16 bytes of shared memory.
__device__ __forceinline__ uint4 e4m3_to_half(uint32_t first, uint32_t second) {
  const uint2 a = e4m3_to_half(first), b = e4m3_to_half(second);
  return make_uint4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ uint4 e4m3_to_half(uint2 codes) { return e4m3_to_half(codes.x, codes.y); }
__device__ __forceinline__ uint4 e4m3_to_half(uint64_t codes) {
  return e4m3_to_half((uint32_t)codes, (uint32_t)(codes >> 32));
}

// Two e2m1 codes, in the lowest bits of each half: their bits are placed where half has exponent and fraction, which
// makes 2^-14 of their values, subnormal codes included.
__device__ __forceinline__ uint32_t e2m1_pair_to_half(uint32_t v) {
  constexpr uint32_t kTwoTo14 = 0x74007400u;
  return multiply_halves((v & 0x00070007u) << 9 | (v & 0x00080008u) << 12, kTwoTo14);
}

// Codes 2 i and 2 i + 1 of eight e2m1 codes, the first of which is in the lowest bits, in the lowest bits of each half.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t codes, int i) {
  const uint32_t two = codes >> 8 * i;
  return (two & 0xFu) | (two << 12 & 0xF0000u);
}

// Eight e2m1 codes.
__device__ __forceinline__ uint4 e2m1_to_half(uint32_t codes) {
  const auto pair = [&](int i) { return e2m1_pair_to_half(e2m1_pair(codes, i)); };
  return make_uint4(pair(0), pair(1), pair(2), pair(3));
}

__device__ __forceinline__ uint4 scaled(uint4 v, uint32_t scale_pair) {
  return make_uint4(multiply_halves(v.x, scale_pair), multiply_halves(v.y, scale_pair),
                    multiply_halves(v.z, scale_pair), multiply_halves(v.w, scale_pair));
}

// The larger of what two words of two bfloat16 are in absolute value, half by half; NaN only where both are.
__device__ __forceinline__ uint32_t larger_bf16(uint32_t a, uint32_t b) {
  return larger_bf16_pair(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
}

// The bits of the largest of eight bfloat16, in absolute value, as a float.
__device__ __forceinline__ uint32_t largest_bf16(uint4 v) {
  const uint32_t m = larger_bf16(larger_bf16(v.x, v.y), larger_bf16(v.z, v.w));
  return max(m & 0xFFFF0000u, m << 16);
}

// Eight bfloat16 times a power of two, which is a pair of them.
__device__ __forceinline__ uint4 bf16_times(uint4 v, uint32_t factor) {
  return make_uint4(multiply_bf16(v.x, factor), multiply_bf16(v.y, factor), multiply_bf16(v.z, factor),
                    multiply_bf16(v.w, factor));
}

// The same as halves.
__device__ __forceinline__ uint4 bf16_to_half(uint4 v, uint32_t factor) {
  const auto pair = [](uint32_t w) {
    const float2 f = unpack(__nv_bfloat16(), w);
    return pack(__half(), f.x, f.y);
  };
  v = bf16_times(v, factor);
  return make_uint4(pair(v.x), pair(v.y), pair(v.z), pair(v.w));
}

// Halves of the even ones of eight bfloat16, and of the odd ones.
__device__ __forceinline__ uint2 even_bf16_to_half(uint4 v) {
  return make_uint2(pack(__half(), __uint_as_float(v.x << 16), __uint_as_float(v.y << 16)),
                    pack(__half(), __uint_as_float(v.z << 16), __uint_as_float(v.w << 16)));
}
__device__ __forceinline__ uint2 odd_bf16_to_half(uint4 v) {
  const auto high = [](uint32_t w) { return __uint_as_float(w & 0xFFFF0000u); };
  return make_uint2(pack(__half(), high(v.x), high(v.y)), pack(__half(), high(v.z), high(v.w)));
}

// Halves that are e4m3 numbers, as another type.
__device__ __forceinline__ uint4 half_to(__half, uint4 v) { return v; }
__device__ __forceinline__ uint4 half_to(__nv_bfloat16, uint4 v) {
  const auto pair = [](uint32_t w) {
    const float2 f = unpack(__half(), w);
    return pack(__nv_bfloat16(), f.x, f.y);
  };
  return make_uint4(pair(v.x), pair(v.y), pair(v.z), pair(v.w));
}

// Whether the rope part of a row counts in the row's unit. As bfloat16 it can, whatever the unit; as halves, for fp16
// queries, its numbers stay as they are.
template <class T>
constexpr bool kRopeCounts = std::is_same<T, __nv_bfloat16>::value;

// Eight bfloat16 of a rope part as T; finite numbers stay finite.
__device__ __forceinline__ uint4 rope_as(__nv_bfloat16, uint4 v, uint32_t inverse_unit) {
  return bf16_times(v, inverse_unit);
}
__device__ __forceinline__ uint4 rope_as(__half, uint4 v, uint32_t) {
  return make_uint4(bf16_to_fp16(v.x), bf16_to_fp16(v.y), bf16_to_fp16(v.z), bf16_to_fp16(v.w));
}

// The same from halves.
__device__ __forceinline__ uint4 rope_from(__nv_bfloat16 t, uint4 v, uint32_t inverse_unit) {
  return bf16_times(half_to(t, v), inverse_unit);
}
__device__ __forceinline__ uint4 rope_from(__half, uint4 v, uint32_t) { return v; }

// What a float32 scale, by its bits, has besides its power of two and sign; NaN stays NaN.
__device__ __forceinline__ float mantissa_of(uint32_t scale) {
  return __uint_as_float((scale & 0x7FFFFFFFu) > 0x7F800000u ? scale : (scale & 0x7FFFFFu) | 0x3F800000u);
}

// The power of two that a row of numbers is counted in when they are stored as halves, given the bits of the largest
// of them as a float: that one is then stored as a number of 2^14 .. 2^15, or as what it is if infinite or NaN. Smaller
// numbers lose bits below 2^-28 of it. A row whose largest number is below 2^-60 is stored as if it were that: bfloat16
// that count in the same unit stay in range.
struct RowUnit {
  static constexpr uint32_t kOne = 1u << 23;
  uint32_t bits;

  __device__ __forceinline__ explicit RowUnit(uint32_t largest)
      : bits(min(max(largest & 0x7F800000u, 67 * kOne), 227 * kOne) - 14 * kOne) {}
  // The largest number of codes with a scale, as bits of a float: they reach 448, a little less than 2^9.
  static __device__ __forceinline__ uint32_t of_largest_code(uint32_t scale_bits) {
    return min(scale_bits, 246 * kOne) + 8 * kOne;
  }
  // What is not zero of this says that some scale is not of 2^-15 up to 1 (below 2), by the bits of a float; or of 2^-14 up to 2, by
  // four bytes of exponents.
  static __device__ __forceinline__ uint32_t beyond(uint32_t scale_bits) { return (scale_bits ^ 0x38000000u) & 0x78000000u; }
  static __device__ __forceinline__ uint32_t bytes_beyond(uint32_t four) {
    return (four - 0x01010101u ^ 0x70707070u) & 0xF0F0F0F0u;
  }
  static __device__ __forceinline__ RowUnit power(int log2) {
    RowUnit r(0);
    r.bits = (127 + log2) * kOne;
    return r;
  }
  __device__ __forceinline__ bool is_power(int log2) const { return bits == (127 + log2) * kOne; }

  __device__ __forceinline__ RowUnit over(int log2) const {  // a power of two
    RowUnit r(0);
    r.bits = bits - log2 * kOne;
    return r;
  }
  __device__ __forceinline__ float unit() const { return __uint_as_float(bits); }
  __device__ __forceinline__ float inverse() const { return __uint_as_float(254 * kOne - bits); }
  __device__ __forceinline__ uint32_t inverse_pair() const {  // of bfloat16
    return __byte_perm(254 * kOne - bits, 0, 0x3232);
  }
};

}  // namespace fm
