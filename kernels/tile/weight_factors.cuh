// What weights count in where V is converted to half: P x (the unit of the token's row) is stored as a half, times a factor
// of each query row's own, so that the largest weight of a tile becomes 2^10 or a little more or less. The factor moves, as
// the softmax's reference does, when it is off by more than some slack; accumulators move with it. 64 rows; few rows have
// the same in their softmax state (few_softmax.cuh).
#pragma once
#include <stdint.h>

#include "numbers.cuh"

namespace fm {

constexpr int kWeightExponent = 10;
constexpr float kMostWeight = 32768.f;

// Of the two rows a thread shares with three neighbours.
struct WeightFactors {
  float factor[2] = {0x1p100f, 0x1p100f};  // powers of two

  // Multiplies weights, which have their tokens' units, with their row's factor. `shrink`, what the accumulators have to be
  // multiplied with since the reference moved, becomes that with the factor's moves. By whole warps.
  __device__ __forceinline__ void apply(float (&s)[32], float2& shrink) {
    shrink.x = apply_to_row<0>(s, shrink.x);
    shrink.y = apply_to_row<1>(s, shrink.y);
  }
  // What the accumulators count in.
  __device__ __forceinline__ float unit(int h) const { return inverse_power_of_two(factor[h]); }

 private:
  template <int H>
  __device__ __forceinline__ float apply_to_row(float (&s)[32], float shrink) {
    float top = 0.f;
#pragma unroll
    for (int g = 0; g < 8; ++g) top = fmaxf(top, fmaxf(s[4 * g + 2 * H], s[4 * g + 2 * H + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (top > 0.f && (shrink != 1.f || top * factor[H] > kMostWeight)) {
      const uint32_t exponent = __float_as_uint(top) & 0x7F800000u;
      const float next = __uint_as_float((254u + kWeightExponent << 23) - exponent);
      shrink *= next * inverse_power_of_two(factor[H]);
      factor[H] = next;
    }
#pragma unroll
    for (int g = 0; g < 8; ++g) s[4 * g + 2 * H] *= factor[H], s[4 * g + 2 * H + 1] *= factor[H];
    return shrink;
  }
};

}  // namespace fm
