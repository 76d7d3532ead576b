// What weights count in where V is converted to half: P x (the unit of the token's row) is stored as a half, in a power of
// two that moves, as the softmax's reference does, when a tile has rows of a much larger unit. Tiles of codes only.
#pragma once
#include "../ptx/control.cuh"
#include "../ptx/shared.cuh"
#include "masking.cuh"
#include "work.cuh"

namespace fm {

struct WeightUnit {
  static constexpr float kSlack = 8.f;   // how much larger a row's unit may be
  static constexpr float kShift = 16.f;  // with both slacks, weights stay below 2^15
  static_assert(kReferenceSlack == 8.f);

  float unit = 0x1p-120f;

  // Before a tile's weights are stored; returns what the accumulators have to be multiplied with. The same in all
  // threads. By whole warps.
  __device__ __forceinline__ float take(const float (&of_token)[kTileTokens]) {
    const float2 two = reinterpret_cast<const float2*>(of_token)[warpgroup_thread() % 32];
    const float top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(two.x, two.y))));
    if (top <= unit * kSlack) return 1.f;
    const float move = unit * power_of_two_inverse(top);
    unit = top;
    return move;
  }
  // What a weight is multiplied with, besides the unit of its token's row.
  __device__ __forceinline__ float of_weights() const { return kShift * power_of_two_inverse(unit); }
  // What the accumulators count in.
  __device__ __forceinline__ float of_result() const { return unit * (1.f / kShift); }

 private:
  static __device__ __forceinline__ float power_of_two_inverse(float x) {
    return __uint_as_float((254u << 23) - __float_as_uint(x));
  }
};

}  // namespace fm
