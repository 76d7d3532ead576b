// How the parts of a split unit, more than two, are added up in a CTA of 64 rows (split_unit.cuh has the rest). A row block of a slot
// lies so that a thread of the values role stores sixteen bytes at a time: HalfPart. So do two parts of raw rows.
#pragma once
#include <stdint.h>

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

// The quarters of the columns that a warpgroup of the values role accumulates, in the order in which it uses up their blocks. The last
// quarter, which has the fewest blocks, is the first of its half.
__device__ __forceinline__ int quarter(int half, int b) { return half == 0 ? b : 3 - b; }

// Pair i is rows 16 (i / 8) + i % 8 + {0, 8}.
__device__ __forceinline__ int first_row_of_pair(int pair) { return pair / 8 * 16 + pair % 8; }

// What this CTA has of a slot.
template <class Map>
__device__ __forceinline__ uint8_t* part_bytes(const FmDecodeParams& p, const RowBlock& r) {
  return reinterpret_cast<uint8_t*>(p.partial_out + slot_row<Map>(p, r, 0) * kLatent);
}

// halves [32 pairs of rows][4 quarters of the columns][32 chunks][2 pairs of columns][2 rows][2 columns], the pairs of columns
// being 2 chunk and 64 + 2 chunk of the quarter, and what they are multiplied with, a byte for the eight numbers of a row in
// the chunks of both quarters of a half: powers of two, as the exponents of floats
// [32 pairs of rows][2 halves of the columns][4 for chunk % 4][8 for chunk / 4][2 rows]
// It is half the bytes: what limits adding up is that all parts of all row blocks go to the L2 and come back.
struct HalfPart : HalfScale {
  static constexpr int kPieces = 4, kPieceColumns = kLatent / kPieces;
  // Under way, by a lane. With more of raw rows the compiler moves descriptors in the loop of tiles, with fewer of others it spills.
  template <class Map>
  static constexpr int kReads = Map::kRaw ? 8 : 16;
  static constexpr int kScalesOffset = kRowPairs * kPieces * kPieceBytes;
  static constexpr int kOwnChunks = 8;     // of a thread of 16-bit numbers, chunk % 4 being the same
  static __device__ __forceinline__ int scales_offset(int pair, int half, int chunk) {
    return kScalesOffset + ((pair * 2 + half) * 32 + chunk % 4 * kOwnChunks + chunk / 4) * 2;
  }
  static __device__ __forceinline__ int column(int chunk, int k) { return kPieceColumns / 2 * k + 2 * chunk; }
  static __device__ __forceinline__ void add(float4 (&sum)[2], float a, float b, uint4 v) {
    add_pairs(sum[0], a, v.x, b, v.y), add_pairs(sum[1], a, v.z, b, v.w);
  }
};

// Stores what a warp has of a pair of rows, of its pieces from `piece` on. Half of the lanes have each row's `top` and `sum`. With two
// groups of lanes each has a sum of its own: they exchange, and each stores a row.
template <class T, class Map, int Pieces, int Groups>
__device__ __forceinline__ void store_pair(const FmDecodeParams& p, const RowBlock& r, int pair, int piece, int chunk, float top,
                                           float sum, bool write_lse, const float4 (&total)[Pieces][2]) {
  const int lane = block_thread() % 32, own = lane / 16, block_row = first_row_of_pair(pair) + 8 * own;
  RowBlock whole = r;
  whole.slot = -1;
  const float factor = row_factor<Map>(p, whole, block_row, top, sum, write_lse && lane % 16 == 0);
  const int64_t own_offset = row_offset(p, r, r.row_begin + block_row, p.out_stride);
  const auto store = [&](T* out, int i, float factor, float2 x, float2 y) {
    out += (piece + i) * HalfPart::kPieceColumns;
    *reinterpret_cast<uint32_t*>(out + HalfPart::column(chunk, 0)) = pack_result(T(), x.x * factor, x.y * factor);
    *reinterpret_cast<uint32_t*>(out + HalfPart::column(chunk, 1)) = pack_result(T(), y.x * factor, y.y * factor);
  };
  const auto of_row = [](float4 v, int h) { return h == 0 ? make_float2(v.x, v.y) : make_float2(v.z, v.w); };
  if constexpr (Groups == 2) {
    const auto of_both = [&](float4 v) {
      const float2 kept = of_row(v, own), sent = of_row(v, 1 - own);
      return make_float2(kept.x + __shfl_xor_sync(~0u, sent.x, 16), kept.y + __shfl_xor_sync(~0u, sent.y, 16));
    };
    const float2 x = of_both(total[0][0]), y = of_both(total[0][1]);
    if (r.row_begin + block_row < r.rows) store(reinterpret_cast<T*>(p.out) + own_offset, 0, factor, x, y);
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float f = __shfl_sync(~0u, factor, 16 * h);
      T* out = reinterpret_cast<T*>(p.out) + __shfl_sync(~0u, own_offset, 16 * h);
      if (r.row_begin + first_row_of_pair(pair) + h * 8 >= r.rows) return;
#pragma unroll
      for (int i = 0; i < Pieces; ++i) store(out, i, f, of_row(total[i][0], h), of_row(total[i][1], h));
    }
  }
}

// Adds up the parts of a pair of rows, by a warp: `Pieces` pieces from piece `first` on; with two groups of lanes, half of one
// piece, `first` counting halves, each group having every other part. `r` has the unit's first slot. What runs here runs once or
// twice, so that it has to be short: fetching instructions takes longer than they do.
template <class T, class Map, int Pieces, int Groups>
__device__ __forceinline__ void add_parts_of_pair(const FmDecodeParams& p, const RowBlock& r, int parts, int pair,
                                                  int first) {
  static_assert(Groups == 1 || Pieces == 1);
  constexpr int kBatch = HalfPart::template kReads<Map> / Pieces, kScales = Pieces == HalfPart::kPieces ? 2 : 1;
  constexpr int kWeights = 16 * Groups;  // of a row, at a time: with one group half of the lanes have each row's
  constexpr int kChunks = 32 / Groups;
  const int lane = block_thread() % 32, piece = first / Groups, chunk = first % Groups * kChunks + lane % kChunks;
  const int stride = p.team * kTileRows;  // rows from one slot to the next
  const auto lse_of = [&](int h) {
    return p.partial_lse + slot_lse<Map>(p, r, first_row_of_pair(pair) + 8 * h) + lane % kWeights;
  };
  const uint8_t* from = part_bytes<Map>(p, r) + (pair * HalfPart::kPieces + piece) * kPieceBytes + chunk * 16;
  const uint8_t* scales_from = part_bytes<Map>(p, r) + HalfPart::scales_offset(pair, piece * 2 / HalfPart::kPieces, chunk);
  PartWeights<kWeights> weights[Groups];
  float4 total[Pieces][2] = {};
#pragma unroll 1
  for (int base = 0; base < parts; base += kBatch * Groups) {
    const bool first_of_weights = base % kWeights == 0;
    const auto ask = [&](int h) { weights[h].ask(lse_of(Groups == 1 ? lane / 16 : h), base, parts, lane % kWeights); };
    if (!Map::kRaw && first_of_weights)  // before the parts: they are waited for first; of raw rows that takes longer
#pragma unroll
      for (int h = 0; h < Groups; ++h) ask(h);
    uint4 v[kBatch][Pieces];
    uint32_t scales[kBatch][kScales];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {  // past the last part: that one again
      const int part = min(base + j * Groups + lane / kChunks, parts - 1);
      const uint64_t offset = (uint64_t)(uint32_t)part * (uint32_t)(stride * kLatent * 4);
#pragma unroll
      for (int i = 0; i < Pieces; ++i) v[j][i] = __ldcg(reinterpret_cast<const uint4*>(from + offset + kPieceBytes * i));
#pragma unroll
      for (int i = 0; i < kScales; ++i)
        scales[j][i] = __ldcg(reinterpret_cast<const uint16_t*>(scales_from + offset + 64 * i));
    }
    if (first_of_weights)
#pragma unroll
      for (int h = 0; h < Groups; ++h) {
        if (Map::kRaw) ask(h);
        weights[h].find(base);
      }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int first = base + j * Groups, part = first + lane / kChunks;
      const float a = weights[0].of(part, first), b = weights[Groups - 1].of(part, first, Groups == 1 ? 16 : 0);
      if (part >= parts) continue;
#pragma unroll
      for (int i = 0; i < Pieces; ++i) {
        const uint32_t both = scales[j][i * kScales / Pieces];
        HalfPart::add(total[i], a * HalfPart::scale(both & 0xFF), b * HalfPart::scale(both >> 8), v[j][i]);
      }
    }
  }
  float sum = weights[0].total(), top = weights[0].top;
  if (Groups == 2) {
    const float second = weights[Groups - 1].total();
    if (lane >= 16) sum = second, top = weights[Groups - 1].top;
  }
  store_pair<T, Map, Pieces, Groups>(p, r, pair, piece, chunk, top, sum, first == 0, total);
}

// Pairs begin .. end, or halves of their columns.
template <class T, class Map, int Pieces, int Groups = 1>
__device__ __forceinline__ void add_parts_of_pairs(const FmDecodeParams& p, const RowBlock& r, int parts, int begin,
                                                   int end, int warp, bool halves = false) {
  constexpr int kTasks = HalfPart::kPieces / Pieces * Groups;  // of a pair
#pragma unroll 1
  for (int task = (begin * kTasks >> halves) + warp; task < end * kTasks >> halves; task += 8)
    add_parts_of_pair<T, Map, Pieces, Groups>(p, r, parts, task / kTasks, task % kTasks * Pieces);
}

// By both values warpgroups when their partial results have been stored: a task for each warp, or more. Of many parts a CTA's piece is of
// halves of the columns of pairs.
template <class T, class Map, class Load>
__device__ __forceinline__ void finish_part_of_pairs(const FmDecodeParams& p, int item, DecodeControl& control,
                                                     Load load_unit) {
  constexpr int kMost = Map::kManyPieces ? 2 * kRowPairs : kRowPairs;
  constexpr int kOneGroup = !Map::kRaw ? 31 : Map::kManyPieces ? kRowPairs : 0x7FFFFFFF;  // parts that one group of lanes adds up, at most
  const auto tasks = [](int parts) { return parts <= kRowPairs ? kRowPairs : kMost; };
  finish_part<Map, kMost>(p, load_unit, item, tasks, control, [&](const RowBlock& r, int parts, int begin, int end, int warp) {
    if (parts < 8)
      add_parts_of_pairs<T, Map, 4>(p, r, parts, begin, end, warp);
    else if (parts < 16)
      add_parts_of_pairs<T, Map, 2>(p, r, parts, begin, end, warp);
    else if (parts <= kOneGroup)
      add_parts_of_pairs<T, Map, 1>(p, r, parts, begin, end, warp);
    else
      add_parts_of_pairs<T, Map, 1, 2>(p, r, parts, begin, end, warp, tasks(parts) > kRowPairs);
  });
}

}  // namespace fm
