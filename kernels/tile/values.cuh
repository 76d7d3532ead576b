// The values role: two warpgroups accumulate O = P V, 64 rows x 256 columns each, in registers (as two blocks of 128
// columns), and write the finished rows to the output or, for a part of a split unit, to its slot of partial results, which
// split_rows.cuh adds up.
#pragma once
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/wgmma.cuh"
#include "split_rows.cuh"
#include "work.cuh"

namespace fm {

// o[b][4g + 2h + e]: row row0 + 8h, column 8g + 2 (lane % 4) + e of quarter(half, b).
using Accumulators = float[2][64];

// The quarters of the columns that a warpgroup accumulates, in the order in which it uses up their blocks. The last
// quarter, which has the fewest blocks, is the first of its half.
__device__ __forceinline__ int quarter(int half, int b) { return half == 0 ? b : 3 - b; }

__device__ __forceinline__ void scale_rows(Accumulators& o, float factor0, float factor1) {
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int g = 0; g < 16; ++g) {
      o[b][4 * g] *= factor0, o[b][4 * g + 1] *= factor0;
      o[b][4 * g + 2] *= factor1, o[b][4 * g + 3] *= factor1;
    }
}

// One block of 128 columns: O += P V, over the tokens of k16 steps Begin .. End.
template <int Begin, int End, class T>
__device__ __forceinline__ void multiply_weights_values(T, float (&o)[64], uint32_t weights, uint32_t values) {
  wgmma_fence();
#pragma unroll
  for (int k = Begin; k < End; ++k)
    wgmma_ss_n128_bn(T(), o, smem_descriptor(weights + k * 32, 0, kAtomBytes),
                     smem_descriptor(values + k * 2 * kGroupBytes, kAtomBytes, kGroupBytes));
  wgmma_commit();
}

// 128 columns of a row as 16-bit numbers. Of each four groups of eight columns a lane gets one, by a transposition among
// the four lanes of a row, and stores sixteen bytes.
template <class T>
__device__ __forceinline__ void store_row(const float (&o)[64], int h, T* row, bool present, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  row += lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = pack_result(T(), o[(4 * i + j) * 4 + 2 * h], o[(4 * i + j) * 4 + 2 * h + 1]);
    const uint32_t r0 = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), r1 = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    const uint32_t a0 = odd ? r0 : w[0], a1 = odd ? w[1] : r0, b0 = odd ? r1 : w[2], b1 = odd ? w[3] : r1;
    const uint32_t r2 = __shfl_xor_sync(~0u, upper ? a0 : b0, 2), r3 = __shfl_xor_sync(~0u, upper ? a1 : b1, 2);
    if (present)
      *reinterpret_cast<uint4*>(row + 32 * i) = upper ? make_uint4(r2, r3, b0, b1) : make_uint4(a0, a1, r2, r3);
  }
}

template <class T>
__device__ __forceinline__ void store_result(const FmDecodeParams& p, const RowBlock& r, const Accumulators& o,
                                             int row0, int half, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = r.row_begin + row0 + 8 * h;
    const bool present = row < r.rows;
    T* out = reinterpret_cast<T*>(p.out) + (present ? row_offset(p, r, row, p.out_stride) : 0);
#pragma unroll
    for (int b = 0; b < 2; ++b) store_row<T>(o[b], h, out + quarter(half, b) * kBlockWidth, present, lane);
  }
}

// To the row block's place in its slot, of which split_rows.cuh says how it lies.
template <class Map>
__device__ __forceinline__ void store_partial_result(const FmDecodeParams& p, const RowBlock& r, const Accumulators& o,
                                                     int warp, int half, int lane) {
  float* partial = p.partial_out + slot_row<Map>(p, r, 0) * kLatent + (warp * 8 + lane / 4) * kPairNumbers + lane % 4 * 4;
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int g = 0; g < 16; ++g)
      *reinterpret_cast<float4*>(partial + quarter(half, b) * 2 * kBlockWidth + g * 16) =
          make_float4(o[b][4 * g], o[b][4 * g + 1], o[b][4 * g + 2], o[b][4 * g + 3]);
}

// T: of the output; M: what is multiplied.
template <class T, class M, class Map>
__device__ __forceinline__ void accumulate_values(const FmDecodeParams& p, int half, uint32_t smem,
                                                  DecodeControl& control) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, row0 = warp * 16 + lane / 4;
  TilePlace<Map> place;
  uint32_t result_parity = 0;
  for_each_row_block<Map>(p, [&](int item, const RowBlock& range) {
    Accumulators o;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i / 64][i % 64] = 0.f;
    for (int tiles = range.tile_end - range.tile_begin; tiles > 0; --tiles) {
      mbarrier_wait(shared_address(&control.weights_full[place.rope()]), place.rope_parity());
      if (control.rescale[place.rope()][warp])
        scale_rows(o, control.factor[place.rope()][row0], control.factor[place.rope()][row0 + 8]);
      const uint32_t weights = uniform(smem + Map::rope_offset(place.rope()));
      const int first = place.block(quarter(half, 0)), second = place.block(quarter(half, 1));
      wait_for_block<Map>(control, place, quarter(half, 0));
      multiply_weights_values<0, 4>(M(), o[0], weights, uniform(smem + block_offset(first)));
      wait_for_block<Map>(control, place, quarter(half, 1));
      // The first block is released as soon as it is used up, with enough handed over to keep the tensor cores busy.
      multiply_weights_values<0, 2>(M(), o[1], weights, uniform(smem + block_offset(second)));
      wgmma_wait<1>();
      if (!Map::kCodes && lane < p.multicast) mbarrier_arrive_at(shared_address(&control.block_empty[first]), lane);
      multiply_weights_values<2, 4>(M(), o[1], weights, uniform(smem + block_offset(second)));
      wgmma_wait<0>();
      if (lane < p.multicast) {
        if (!Map::kCodes) mbarrier_arrive_at(shared_address(&control.block_empty[second]), lane);
        mbarrier_arrive_at(shared_address(&control.tile_empty[place.rope()]), lane);
      }
      place.advance();
    }
    mbarrier_wait(shared_address(&control.result_full), result_parity);
    scale_rows(o, control.result[row0], control.result[row0 + 8]);
    arrive_once_per_warp(shared_address(&control.result_empty));
    result_parity ^= 1;
    const RowBlock r = load_row_block<Map>(p, item);
    if (r.slot < 0) {
      store_result<T>(p, r, o, row0, half, lane);
    } else {
      const SplitUnit unit = load_split_unit<Map>(p, r);  // before the stores, which fill the queue
      store_partial_result<Map>(p, r, o, warp, half, lane);
      finish_part<T, Map>(p, unit, item, control);
    }
  });
}

}  // namespace fm
