// Numbers of few bits, on the host and on the device with the same bits: e4m3 (OCP float8_e4m3fn), e2m1 (OCP
// float4_e2m1fn), UE8M0 exponents, bfloat16 and half. Plain C++17 where nvcc is not at work. No fast math and
// no flushing of subnormals, here and in whatever includes this.
//
// Where a bfloat16 result is a NaN its payload is not specified; everything else is, NaN codes included.
#pragma once
#include <cstdint>
#include <cstring>

#include "../both.h"

namespace fm {

FM_BOTH uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

FM_BOTH float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000, kQuietNan = 0x7fc00000;
constexpr float kLargestFloat = 3.402823466e38f, kSmallestNormal = 1.175494351e-38f;

// ---- 16 bits ----

FM_BOTH float bf16_to_float(uint16_t bits) { return float_of((uint32_t)bits << 16); }

// Nearest even; a NaN keeps its sign and upper bits.
FM_BOTH uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & ~kSign) > kInfinity) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Two at once, `low` in the low half.
FM_BOTH uint32_t floats_to_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_bf16(low) | (uint32_t)float_to_bf16(high) << 16;
#endif
}

// Exact. A NaN keeps its sign and payload, which the conversion instruction would drop.
FM_BOTH float half_to_float(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude > 0x7c00) return float_of(sign | kQuietNan | magnitude << 13);
  if (magnitude == 0x7c00) return float_of(sign | kInfinity);
  // The exponents' biases differ by 112; the product also makes subnormals right.
  const float value = float_of(magnitude << 13) * float_of((112 + 127) << 23);
  return float_of(sign | bits_of(value));
}

// ---- e4m3 ----

// Nearest even, at most 448; a NaN is 0x7f with its sign.
FM_BOTH uint8_t encode_e4m3(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
  const uint32_t sign = bits >> 24 & 0x80;
  if (magnitude > kInfinity) return (uint8_t)(sign | 0x7f);
  if (magnitude >= 0x43e00000) return (uint8_t)(sign | 0x7e);  // 448
  if (magnitude < 0x3c800000) {                                // 2^-6: multiples of 2^-9, the last bit of 2^14
    const float shifted = float_of(magnitude) + 16384.0f;
    return (uint8_t)(sign | (bits_of(shifted) & 0xf));
  }
  const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
  return (uint8_t)(sign | (rounded - ((127 - 7) << 23)) >> 20);
}

FM_BOTH float decode_e4m3(uint8_t code) {
  const uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7f;
  if (magnitude == 0x7f) return float_of(sign | kQuietNan);
  // The exponents' biases differ by 120; the product also makes subnormals right.
  const float value = float_of(magnitude << 20) * float_of((120 + 127) << 23);
  return float_of(sign | bits_of(value));
}

// The sign bits of four numbers, as those of four codes.
FM_BOTH uint32_t signs_of(const float (&x)[4]) {
#if defined(__CUDA_ARCH__)
  const uint32_t low = __byte_perm(bits_of(x[0]), bits_of(x[1]), 0x0073);
  const uint32_t high = __byte_perm(bits_of(x[2]), bits_of(x[3]), 0x0073);
  return __byte_perm(low, high, 0x5410) & 0x80808080;
#else
  uint32_t signs = 0;
  for (int i = 0; i < 4; ++i) signs |= (bits_of(x[i]) >> 31) << (8 * i + 7);
  return signs;
#endif
}

// Four codes, the first in the low byte. The sign of a NaN may get lost: see `signs_of`.
FM_BOTH uint32_t encode_e4m3x4(const float (&x)[4]) {
#if defined(__CUDA_ARCH__)
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return low | (uint32_t)high << 16;
#else
  uint32_t codes = 0;
  for (int i = 0; i < 4; ++i) codes |= (uint32_t)encode_e4m3(x[i]) << 8 * i;
  return codes;
#endif
}

FM_BOTH void decode_e4m3x4(uint32_t codes, float (&x)[4]) {
#if defined(__CUDA_ARCH__)
  for (int i = 0; i < 2; ++i) {
    uint32_t halves;
    const uint16_t pair = (uint16_t)(codes >> 16 * i);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(x[2 * i]), "=f"(x[2 * i + 1])
        : "r"(halves));
  }
#else
  for (int i = 0; i < 4; ++i) x[i] = decode_e4m3((uint8_t)(codes >> 8 * i));
#endif
}

// ---- e2m1 ----

// The numbers half way between neighbouring codes, times a scale. If that is an e4m3 number they are exact, and comparing a
// number with them is the same as comparing its IEEE quotient with those of scale 1: the number next to one of them gives a
// quotient that is more than half a step off, which does not round to it.
struct HalfWays {
  float at[7];
  FM_BOTH explicit HalfWays(float scale)
      : at{0.25f * scale, 0.75f * scale, 1.25f * scale, 1.75f * scale, 2.5f * scale, 3.5f * scale, 5.0f * scale} {}
};

// `value` over the scale, nearest even, at most 6; a NaN is 0. The sign is kept.
FM_BOTH uint32_t encode_e2m1(float value, const HalfWays& half_ways) {
  const float x = float_of(bits_of(value) & ~kSign);
  const auto& at = half_ways.at;
  const bool upper = x >= at[3], odd_pair = x >= (upper ? at[5] : at[1]);
  const float last = odd_pair ? (upper ? at[6] : at[2]) : (upper ? at[4] : at[0]);
  const uint32_t code = (upper ? 4 : 0) + (odd_pair ? 2 : 0) + (x > last ? 1 : 0);
  return code | (bits_of(value) >> 28 & 8);
}

// Of the low four bits.
FM_BOTH float decode_e2m1(uint32_t code) {
  const float value = float_of((code & 7) << 22) * float_of((126 + 127) << 23);
  return float_of((code & 8) << 28 | bits_of(value));
}

// ---- UE8M0 ----

// 2^(byte - 127), and a NaN for 255.
FM_BOTH float decode_ue8m0(uint8_t byte) {
  return float_of(byte == 0 ? 0x00400000 : byte == 255 ? kQuietNan : (uint32_t)byte << 23);
}

// Of a power of two among the normal numbers.
FM_BOTH uint8_t encode_ue8m0(float power) { return (uint8_t)(bits_of(power) >> 23); }

}  // namespace fm
