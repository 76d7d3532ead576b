// Rows of e2m1 codes among raw rows: they come as they lie in the cache, 256 bytes of codes and 32 e4m3 scales of 16 columns, and
// become rows of e4m3 codes with halves for scales. The bits of an e2m1 number in the lower ones of exponent and fraction are that
// number times 2^-6 in e4m3, subnormal ones, too; scales make up for it. A product of both has six bits at most, from 2^-10 up to
// 2,688: halves hold all of it.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"

namespace fm {

constexpr uint32_t kE2m1RowBytes = 288, kE2m1Scales = 256;

// Eight codes, the first in the lowest bits, as e4m3 codes of 2^-6 of their numbers, in order.
__device__ __forceinline__ uint2 e2m1_to_e4m3(uint32_t codes) {
  const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu);
  const uint32_t odd = (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu);
  return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// Four scales as halves, times 2^6.
__device__ __forceinline__ uint2 e2m1_scales(uint32_t codes) {
  constexpr uint32_t kTwoTo6 = 0x54005400u;
  const uint2 v = e4m3_to_half(codes);
  return make_uint2(multiply_halves(v.x, kTwoTo6), multiply_halves(v.y, kTwoTo6));
}

// The row at `row`, by as many lanes of a warp as have it, of which this one is number `share`; its scales to `scales`, one after another.
// The lanes are in step.
template <int Lanes>
__device__ __forceinline__ void expand_e2m1_row(uint32_t row, uint32_t scales, int share) {
#pragma unroll
  for (int i = 0; i < 2 / Lanes; ++i) {
    const uint32_t at = (share + i) * 16;
    const uint4 v = load_shared_4(row + kE2m1Scales + at);
    const uint2 a = e2m1_scales(v.x), b = e2m1_scales(v.y), c = e2m1_scales(v.z), d = e2m1_scales(v.w);
    store_shared(scales + 2 * at, make_uint4(a.x, a.y, b.x, b.y));
    store_shared(scales + 2 * at + 16, make_uint4(c.x, c.y, d.x, d.y));
  }
  // From the end, lanes in turn and two pieces at a time: what is written lies behind what is still to be read.
  constexpr int kPieces = kE2m1Scales / 16;
#pragma unroll 1
  for (int i = kPieces - 1 - share; i >= 0; i -= 2 * Lanes) {
    uint4 codes[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) codes[j] = load_shared_4(row + 16 * (i - j * Lanes));
    if (Lanes > 1) __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint2 a = e2m1_to_e4m3(codes[j].x), b = e2m1_to_e4m3(codes[j].y), c = e2m1_to_e4m3(codes[j].z), d = e2m1_to_e4m3(codes[j].w);
      store_shared(row + 32 * (i - j * Lanes), make_uint4(a.x, a.y, b.x, b.y));
      store_shared(row + 32 * (i - j * Lanes) + 16, make_uint4(c.x, c.y, d.x, d.y));
    }
  }
}

}  // namespace fm
