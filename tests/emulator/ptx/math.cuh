// As kernels/ptx/math.cuh.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "language/language.h"
#include "../format/codes.h"

namespace fm {

// What is no normal number becomes zero.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.f : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(x)); }

inline float log2_approx(float x) { return std::log2(flushed(x)); }
inline float inverse_approx(float x) { return flushed(1.f / x); }
inline float inverse_of_any(float x) { return 1.f / x; }

inline uint32_t both(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
inline uint32_t pack(__nv_bfloat16, float low, float high) { return both(emulation::to_bf16(low), emulation::to_bf16(high)); }
inline uint32_t pack(__half, float low, float high) { return both(emulation::to_half(low), emulation::to_half(high)); }

// Of the numbers of two words, half by half.
template <class T, class Combine>
uint32_t by_halves(T type, uint32_t a, uint32_t b, Combine combine) {
  constexpr bool kHalf = std::is_same<T, __half>::value;
  const auto number = [](uint32_t v, int shift) { return emulation::to_float(v >> shift, kHalf); };
  return pack(type, combine(number(a, 0), number(b, 0)), combine(number(a, 16), number(b, 16)));
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  return by_halves(__half(), a, b, [](float x, float y) { return x * y; });
}
inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  return by_halves(__nv_bfloat16(), a, b, [](float x, float y) { return x * y; });
}
inline uint32_t add_square_bf16(uint32_t sum, uint32_t a) {
  return by_halves(__nv_bfloat16(), sum, a, [](float s, float x) { return std::fma(x, x, s); });
}
inline uint32_t larger_bf16_pair(uint32_t a, uint32_t b) {
  return by_halves(__nv_bfloat16(), a, b, [](float x, float y) { return std::fmax(x, y); });
}
inline uint2 e4m3_to_half(uint32_t codes) {
  uint16_t halves[4];
  for (int i = 0; i < 4; ++i) halves[i] = emulation::to_half(decode_e4m3(codes >> 8 * i));
  return {both(halves[0], halves[1]), both(halves[2], halves[3])};
}

inline const uint8_t* at_sixteenth(const uint8_t* from, uint32_t index) { return from + uint64_t(index) * 16; }

struct Transposed8x8 {
  uint32_t given, result;
};
inline uint32_t transpose_8x8(uint32_t v) {
  Transposed8x8 own{v, 0};
  emulation::together("movmatrix", own, [](Transposed8x8** lanes) {
    for (int row = 0; row < 8; ++row)
      for (int column = 0; column < 8; ++column) {
        const uint32_t number = lanes[4 * row + column / 2]->given >> column % 2 * 16 & 0xFFFF;
        lanes[4 * column + row / 2]->result |= number << row % 2 * 16;
      }
  });
  return own.result;
}

}  // namespace fm
