// Quantisation of a group: its scale from its largest magnitude, and numbers divided by it.
#pragma once
#include "layout.h"

namespace fm {

// The larger magnitude; a NaN does not count.
FM_BOTH float larger(float amax, float x) {
  const float magnitude = float_of(bits_of(x) & ~kSign);
  return magnitude > amax ? magnitude : amax;
}

// The next power of two, or the normal number itself where it is one.
FM_BOTH float power_of_two_above(float scale) {
  const uint32_t bits = bits_of(scale);
  return float_of((bits & kInfinity) + ((bits & ~kInfinity) != 0 ? 1u << 23 : 0));
}

// Such that no number of the group is above the largest code.
template <Scales kScales>
FM_BOTH float group_scale(float amax, bool round_scale) {
  const float largest = amax < kLargestFloat ? amax : kLargestFloat;
  if (kScales == Scales::kE4m3) {
    const uint8_t code = encode_e4m3(largest / 6.0f);
    return decode_e4m3(code == 0 ? 1 : code);
  }
  const float raw = largest / 448.0f;
  const float scale = raw > kSmallestNormal ? raw : kSmallestNormal;
  return kScales == Scales::kUe8m0 || round_scale ? power_of_two_above(scale) : scale;
}

// Division with its IEEE result: by a power of two it is a product with the inverse, which is exact.
class Divisor {
 public:
  FM_BOTH explicit Divisor(float scale) : scale_(scale) {
    const uint32_t bits = bits_of(scale), exponent = bits >> 23;
    inverts_ = (bits << 9) == 0 && exponent >= 1 && exponent < 254;
    inverse_ = float_of((254 - exponent) << 23);
  }
  FM_BOTH void divide(float (&x)[4]) const {
    if (inverts_) {
      for (float& number : x) number *= inverse_;
    } else {
      for (float& number : x) number /= scale_;
    }
  }

 private:
  float scale_, inverse_;
  bool inverts_;
};

// Eight numbers over their scale to eight codes: two words of e4m3, one of e2m1.
template <int kBits>
FM_BOTH void encode_piece(const float (&x)[8], float scale, uint32_t (&words)[kBits / 4]) {
  if constexpr (kBits == 4) {
    const HalfWays half_ways(scale);
    words[0] = 0;
    for (int i = 0; i < 8; ++i) words[0] |= encode_e2m1(x[i], half_ways) << 4 * i;
  } else {
    const Divisor divisor(scale);
    for (int half = 0; half < 2; ++half) {
      const float source[4] = {x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
      float quotient[4] = {source[0], source[1], source[2], source[3]};
      divisor.divide(quotient);
      // The sign of a NaN is that of the source: a quotient may have lost it.
      words[half] = encode_e4m3x4(quotient) | signs_of(source);
    }
  }
}

// And back: each is one product, `value * scale`.
template <int kBits>
FM_BOTH void decode_piece(const uint32_t (&words)[kBits / 4], float scale, float (&x)[8]) {
  for (int half = 0; half < 2; ++half) {
    float value[4];
    if constexpr (kBits == 8) {
      decode_e4m3x4(words[half], value);
    } else {
      for (int i = 0; i < 4; ++i) value[i] = decode_e2m1(words[0] >> 4 * (4 * half + i));
    }
    for (int i = 0; i < 4; ++i) x[4 * half + i] = value[i] * scale;
  }
}

// The scale of a group of columns.
template <Scales kScales>
FM_BOTH float read_scale(const uint8_t* scales, int group, float tensor_scale) {
  if constexpr (kScales == Scales::kTensor) return tensor_scale;
  if constexpr (kScales == Scales::kFloat) return reinterpret_cast<const float*>(scales)[group];
  return kScales == Scales::kUe8m0 ? decode_ue8m0(scales[group]) : decode_e4m3(scales[group]);
}

}  // namespace fm
