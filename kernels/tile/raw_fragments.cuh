// A operands of matrix products from raw rows of codes: from shared memory by ldmatrix, to halves in registers.
//
// Of K (S^T = K Q^T) a register has two columns of a token. ldmatrix gives a lane four codes in a row, columns 4 j .. 4 j + 3
// of 16 (j = lane % 4): the first two become k = 2 j, 2 j + 1 of the step, the other two k = 2 j + 8, 2 j + 9. Q lies in that
// order, too (raw_query.cuh).
//
// Of V (O^T = V^T P^T) a register has two tokens of a column. ldmatrix with .trans gives a lane columns 2 i and 2 i + 1
// (i = lane / 4, of the 16 of a warp) of tokens 2 j and 2 j + 1: column 2 i becomes row i of the product, 2 i + 1 row i + 8.
#pragma once
#include <stdint.h>

#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"

namespace fm {

// Columns 0, 2, 1, 3 of four codes in order.
__device__ __forceinline__ uint32_t even_columns_first(uint32_t codes) { return __byte_perm(codes, 0, 0x3120); }

// Two k16 steps: 32 columns of a warp's 16 tokens.
struct KeyFragments {
  uint32_t a[2][4];

  // Codes, as ldmatrix has them, times the scales of their tokens, lane / 4 and that 8 on, of each step, where they have some.
  // Interleaved: see raw_query.cuh.
  template <bool Interleaved, bool Scaled>
  __device__ __forceinline__ void convert(const uint32_t (&codes)[4], const uint2 (&scale)[2]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t four = codes[k * 2 + h];
        const uint2 halves = e4m3_to_half(Interleaved ? even_columns_first(four) : four);
        const uint32_t own = h == 0 ? scale[k].x : scale[k].y;
        a[k][h] = Scaled ? multiply_halves(halves.x, own) : halves.x;
        a[k][2 + h] = Scaled ? multiply_halves(halves.y, own) : halves.y;
      }
  }
  // What lies there as 16-bit numbers.
  __device__ __forceinline__ void load_plain(uint32_t from) {
#pragma unroll
    for (int k = 0; k < 2; ++k) load_matrices<false>(a[k], from + 32 * k);
  }
};

// A k16 step of a block of 64 columns, 16 of them this warp's. `scale`: of tokens 2 j, 2 j + 1 and of those 8 on.
struct ValueFragment {
  uint32_t a[4];

  template <bool Scaled>
  __device__ __forceinline__ void convert(uint32_t low, uint32_t high, const uint32_t (&scale)[2]) {
    const uint2 x = e4m3_to_half(even_columns_first(low)), y = e4m3_to_half(even_columns_first(high));
    a[0] = Scaled ? multiply_halves(x.x, scale[0]) : x.x, a[1] = Scaled ? multiply_halves(x.y, scale[0]) : x.y;
    a[2] = Scaled ? multiply_halves(y.x, scale[1]) : y.x, a[3] = Scaled ? multiply_halves(y.y, scale[1]) : y.y;
  }
};

}  // namespace fm
