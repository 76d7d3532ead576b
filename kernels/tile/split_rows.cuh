// How the parts of a split unit are added up in a CTA of 64 rows (split_unit.cuh has the rest). A row block of a slot lies so that
// a thread of the values role stores sixteen bytes at a time: FloatPart, and, for raw rows, HalfPart.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "split_unit.cuh"
#include "work.cuh"

namespace fm {

constexpr int kRowPairs = kTileRows / 2;
constexpr int kPairNumbers = 2 * kLatent;  // of a pair of rows
constexpr int kPieceBytes = 32 * 16;       // what a warp loads at once

// Pair i is rows 16 (i / 8) + i % 8 + {0, 8}.
__device__ __forceinline__ int first_row_of_pair(int pair) { return pair / 8 * 16 + pair % 8; }

// What this CTA has of a slot.
template <class Map>
__device__ __forceinline__ uint8_t* part_bytes(const FmDecodeParams& p, const RowBlock& r) {
  return reinterpret_cast<uint8_t*>(p.partial_out + slot_row<Map>(p, r, 0) * kLatent);
}

// floats [32 pairs of rows][256 pairs of columns][2 rows][2 columns]
struct FloatPart {
  static constexpr int kPieces = 8;  // of a pair of rows
  static constexpr int kReads = 16;  // under way, by a lane
  static constexpr int kPieceColumns = kLatent / kPieces;
  static constexpr int kSums = 1;  // of a lane, in a piece: two columns of both rows
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ int column(int lane, int) { return 2 * lane; }
  static __device__ __forceinline__ void add(float4 (&sum)[1], float a, float b, uint4 v) {
    sum[0].x += a * __uint_as_float(v.x), sum[0].y += a * __uint_as_float(v.y);
    sum[0].z += b * __uint_as_float(v.z), sum[0].w += b * __uint_as_float(v.w);
  }
};

// halves [32 pairs of rows][4 quarters of the columns][32 chunks][2 pairs of columns][2 rows][2 columns], the pairs of columns
// being 2 chunk and 64 + 2 chunk of the quarter, and what they are multiplied with, a byte for the eight numbers of a row in
// the chunks of both quarters of a half: powers of two, as the exponents of floats
// [32 pairs of rows][2 halves of the columns][32 chunks][2 rows]
// It is half the bytes: what limits adding up is that all parts of all row blocks go to the L2 and come back.
struct HalfPart {
  static constexpr int kPieces = 4, kPieceColumns = kLatent / kPieces, kSums = 2;
  static constexpr int kReads = 8;  // with more the compiler moves descriptors in the loop of tiles
  static constexpr bool kScaled = true;
  static constexpr int kScalesOffset = kRowPairs * kPieces * kPieceBytes;
  static constexpr int kTopExponent = 14;  // of the largest of the eight numbers
  static __device__ __forceinline__ int scales_offset(int pair, int half, int chunk) {
    return kScalesOffset + ((pair * 2 + half) * 32 + chunk) * 2;
  }
  // Of numbers up to `top`: the exponent that is stored, and what they are multiplied with before they are rounded.
  static __device__ __forceinline__ uint32_t exponent(float top) {
    return max(__float_as_uint(top) >> 23 & 0xFF, kTopExponent + 1u) - kTopExponent;
  }
  static __device__ __forceinline__ float scale(uint32_t exponent) { return __uint_as_float(exponent << 23); }
  static __device__ __forceinline__ float inverse(uint32_t exponent) { return __uint_as_float(254u - exponent << 23); }
  static __device__ __forceinline__ int column(int lane, int k) { return kPieceColumns / 2 * k + 2 * lane; }
  static __device__ __forceinline__ void add(float4 (&sum)[2], float a, float b, uint4 v) {
    add_pairs(sum[0], a, v.x, b, v.y), add_pairs(sum[1], a, v.z, b, v.w);
  }
};

template <class Map>
using PartNumbers = std::conditional_t<Map::kRaw, HalfPart, FloatPart>;

// Adds up the parts of a pair of rows, by a warp: `Pieces` pieces from piece `first` on. `r` has the unit's first slot. For
// weights lanes 0 .. 15 have parts of the first row, the others of the second. What runs here runs once or twice, so that it
// has to be short: fetching instructions takes longer than they do.
template <class T, class Map, int Pieces>
__device__ __forceinline__ void add_parts_of_pair(const FmDecodeParams& p, const RowBlock& r, int parts, int pair,
                                                  int first) {
  using Numbers = PartNumbers<Map>;
  constexpr int kBatch = Numbers::kReads / Pieces, kHalves = Pieces == Numbers::kPieces ? 2 : 1;
  const int lane = block_thread() % 32, block_row = first_row_of_pair(pair) + lane / 16 * 8;
  const int stride = p.team * kTileRows;  // rows from one slot to the next
  const float* lse = p.partial_lse + slot_row<Map>(p, r, block_row) + lane % 16 * stride;
  const uint8_t* from = part_bytes<Map>(p, r) + (pair * Numbers::kPieces + first) * kPieceBytes + lane * 16;
  const uint8_t* scales_from = part_bytes<Map>(p, r) + HalfPart::scales_offset(pair, first * 2 / HalfPart::kPieces, lane);
  PartWeights<16> weights;
  float4 total[Pieces][Numbers::kSums] = {};
#pragma unroll 1
  for (int base = 0; base < parts; base += kBatch) {
    uint4 v[kBatch][Pieces];
    uint32_t scales[kBatch][kHalves];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {  // past the last part: that one again
      const uint64_t offset = (uint64_t)(uint32_t)min(base + j, parts - 1) * (uint32_t)(stride * kLatent * 4);
#pragma unroll
      for (int i = 0; i < Pieces; ++i) v[j][i] = __ldcg(reinterpret_cast<const uint4*>(from + offset + kPieceBytes * i));
      if (Numbers::kScaled)
#pragma unroll
        for (int i = 0; i < kHalves; ++i)
          scales[j][i] = __ldcg(reinterpret_cast<const uint16_t*>(scales_from + offset + 64 * i));
    }
    if (base % 16 == 0) weights.load(lse, (int64_t)stride, base, parts, lane % 16);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float a = __shfl_sync(~0u, weights.weight, base % 16 + j), b = __shfl_sync(~0u, weights.weight, base % 16 + j + 16);
      if (base + j >= parts) continue;
#pragma unroll
      for (int i = 0; i < Pieces; ++i) {
        float own_a = a, own_b = b;
        if (Numbers::kScaled) {
          const uint32_t both = scales[j][i * kHalves / Pieces];
          own_a *= HalfPart::scale(both & 0xFF), own_b *= HalfPart::scale(both >> 8);
        }
        Numbers::add(total[i], own_a, own_b, v[j][i]);
      }
    }
  }
  const float sum = weights.total();
  RowBlock whole = r;
  whole.slot = -1;
  const float factor = row_factor<Map>(p, whole, block_row, weights.top, sum, first == 0 && lane % 16 == 0);
  const int64_t own_offset = row_offset(p, r, r.row_begin + block_row, p.out_stride);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float f = __shfl_sync(~0u, factor, 16 * h);
    T* out = reinterpret_cast<T*>(p.out) + __shfl_sync(~0u, own_offset, 16 * h) + first * Numbers::kPieceColumns;
    if (r.row_begin + first_row_of_pair(pair) + h * 8 >= r.rows) return;
#pragma unroll
    for (int i = 0; i < Pieces; ++i)
#pragma unroll
      for (int k = 0; k < Numbers::kSums; ++k) {
        const float4 v = total[i][k];
        *reinterpret_cast<uint32_t*>(out + i * Numbers::kPieceColumns + Numbers::column(lane, k)) =
            h == 0 ? pack_result(T(), v.x * f, v.y * f) : pack_result(T(), v.z * f, v.w * f);
      }
  }
}

// Pairs begin .. end.
template <class T, class Map, int Pieces>
__device__ __forceinline__ void add_parts_of_pairs(const FmDecodeParams& p, const RowBlock& r, int parts, int begin,
                                                   int end, int warp) {
  constexpr int kTasks = PartNumbers<Map>::kPieces / Pieces;  // of a pair
#pragma unroll 1
  for (int task = begin * kTasks + warp; task < end * kTasks; task += 8)
    add_parts_of_pair<T, Map, Pieces>(p, r, parts, task / kTasks, task % kTasks * Pieces);
}

// By both values warpgroups when their partial results have been stored.
template <class T, class Map>
__device__ __forceinline__ void finish_part_of_pairs(const FmDecodeParams& p, const SplitUnit& unit, int item,
                                                     DecodeControl& control) {
  finish_part<Map>(p, unit, item, kRowPairs, control, [&](const RowBlock& r, int parts, int begin, int end, int warp) {
    constexpr int kAll = PartNumbers<Map>::kPieces;
    if (parts <= 4)
      add_parts_of_pairs<T, Map, kAll>(p, r, parts, begin, end, warp);
    else if (parts <= 8)
      add_parts_of_pairs<T, Map, kAll / 2>(p, r, parts, begin, end, warp);
    else
      add_parts_of_pairs<T, Map, 1>(p, r, parts, begin, end, warp);
  });
}

}  // namespace fm
