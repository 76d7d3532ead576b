// The values role of raw rows: two warpgroups accumulate O^T = V^T P^T, 256 columns of V x all rows each, with V from
// registers (raw_fragments.cuh). o[m][FewLayout::value(c, h)] is row FewLayout::row(c), column
// 64 m + 16 warp + 2 (lane / 4) + h of the warpgroup's half.
#pragma once
#include <cuda_fp16.h>
#include <stddef.h>
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/wgmma.cuh"
#include "few_softmax.cuh"
#include "last_adds.cuh"
#include "few_values.cuh"
#include "merge_parts.cuh"
#include "numbers.cuh"
#include "raw_fragments.cuh"
#include "raw_map.cuh"
#include "shared_map.cuh"
#include "split_few.cuh"
#include "split_rows.cuh"
#include "split_unit.cuh"
#include "work.cuh"

namespace fm {

// What a warp reads of V in a tile.
template <class Map>
struct ValuePlace {
  uint32_t matrices;  // this lane's row of the first 16, and the warp's 16 columns; half of the lanes a block on
  uint32_t scales;    // of the lane's tokens, of the warp's first group of columns
  uint32_t block_stride;  // of rows that may be swizzled
  int shift;

  __device__ __forceinline__ ValuePlace(uint32_t smem, int place, int half, int box_shift) {
    const int lane = warpgroup_thread() % 32, warp = warpgroup_thread() / 32, column = half * 256 + warp * 16;
    if constexpr (Map::kSwizzled) {
      const RowLayout<Map> layout = {box_shift};
      block_stride = layout.block_stride(), shift = box_shift;
      matrices = Map::row(smem, place, 0) + layout.row(lane % 16) + half * 2 * block_stride +
                 (warp * 16 + lane / 16 * 64 ^ layout.swizzle(lane));
    } else {
      matrices = Map::row(smem, place, lane % 16) + column + lane / 16 * 64;
    }
    scales = Map::scales(smem, place) + offsetof(typename Map::Scales, of_value) +
             column / (kLatent / Map::kGroups) * (kTileTokens * 2) + lane % 4 * 32;
  }
  // Of a tile that many places on.
  __device__ __forceinline__ ValuePlace plus(int places) const {
    ValuePlace r = *this;
    r.matrices += places * (kTileTokens * Map::kRowBytes), r.scales += places * (uint32_t)sizeof(typename Map::Scales);
    return r;
  }
  // Tokens 16 step + 2 (lane % 4) + {0, 1} and those 8 on, for block `block` of 64 columns.
  __device__ __forceinline__ void load_scales(uint32_t (&scale)[2], int step, int block) const {
    const float2 v = load_shared_2(scales + block * 64 / (kLatent / Map::kGroups) * (kTileTokens * 2) + step * 8);
    scale[0] = __float_as_uint(v.x), scale[1] = __float_as_uint(v.y);
  }
  // Codes of blocks 2 pair and 2 pair + 1: tokens 16 step .. 16 step + 8 of the first, then those 8 on, then of the second.
  __device__ __forceinline__ void load(uint32_t (&codes)[4], int step, int pair) const {
    if constexpr (Map::kSwizzled)
      load_matrices<true>(codes, matrices + RowLayout<Map>{shift}.row(step * 16) + pair * block_stride);
    else
      load_matrices<true>(codes, matrices + step * 16 * Map::kRowBytes + pair * 128);
  }
  // The last 64 columns of all, where they are halves, of a step as its fragment has them: even columns of tokens 0 .. 7, odd
  // ones, and the same of tokens 8 .. 15.
  template <int Blocks>
  __device__ __forceinline__ void load_plain(uint32_t (&halves)[4], int step) const {
    const int lane = warpgroup_thread() % 32, warp = warpgroup_thread() / 32;
    const uint32_t first = matrices - lane % 16 * Map::kRowBytes - warp * 16 - (8 - Blocks) * 64 - lane / 16 * 64;  // of the tile
    load_matrices<true>(halves, first + (step * 16 + lane % 8 + lane / 16 * 8) * Map::kRowBytes + Map::kPlain + warp * 32 +
                                    lane / 8 % 2 * 16);
  }
};

// Codes of V on their way from shared memory, and their scales. Those of a tile's first blocks come while other things are
// looked at. Blocks: of 64 columns, that are multiplied.
template <class Map, int Blocks>
struct ValueCodes {
  static constexpr int kPairs = Blocks / 2;
  static constexpr int kScales = Map::kHasRope ? 1 : 2;  // of a pair of blocks
  uint32_t codes[Map::kValueCodesAhead + 1][4], scale[2][kScales][2];

  __device__ __forceinline__ explicit ValueCodes(const ValuePlace<Map>& values) {
#pragma unroll
    for (int i = 0; i < Map::kValueCodesAhead; ++i) values.load(codes[i], i / kPairs, i % kPairs);
    if (Map::kScaledValues) load_scales(values, 0);
  }
  // Of pair `i` of all of a tile's.
  __device__ __forceinline__ void load_scales(const ValuePlace<Map>& values, int i) {
#pragma unroll
    for (int b = 0; b < kScales; ++b) values.load_scales(scale[i % 2][b], i / kPairs, i % kPairs * 2 + b);
  }
};

template <class Map>
__device__ __forceinline__ Operand tile_weights(uint32_t smem, int place) {
  return Operand(Map::weights(smem, place), 0, kAtomBytes);
}

// O += V^T P^T of a tile, one or two blocks of 64 columns at a time; the next ones are converted during it. Plain: the last block's are
// halves. Calls used() when all of the tile's rows and scales are in registers.
template <class M, class Map, bool Plain, int Blocks, class Used>
__device__ __forceinline__ void multiply_raw_values(float (&o)[Blocks][Map::kRows / 2], const ValuePlace<Map>& values,
                                                    ValueCodes<Map, Blocks>& under_way, Operand weights, Used used) {
  constexpr int kPairs = Blocks / 2, kAll = 4 * kPairs;
  constexpr int kAhead = Map::kValuesAhead, kCodesAhead = Map::kValueCodesAhead, kCodes = kCodesAhead + 1;
  constexpr int kTogether = Map::kValuesTogether, kGroups = 2 / kTogether;  // products, and of a pair
  ValueFragment v[kAhead][kTogether];
  auto& codes = under_way.codes;
  auto& scale = under_way.scale;
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    const int step = i / kPairs, pair = i % kPairs, next = i + kCodesAhead;
    if (next < kAll) values.load(codes[next % kCodes], next / kPairs, next % kPairs);
    if (Map::kScaledValues && i + 1 < kAll) under_way.load_scales(values, i + 1);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int group = i * kGroups + g;
      if (group >= kAhead) wgmma_wait<kAhead - 1>();
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int b = g * kTogether + j;
        ValueFragment& own = v[group % kAhead][j];
        if (Plain && 2 * pair + b == Blocks - 1)
          values.template load_plain<Blocks>(own.a, step);
        else
          own.template convert<Map::kScaledValues>(codes[i % kCodes][b * 2], codes[i % kCodes][b * 2 + 1],
                                            scale[i % 2][b % under_way.kScales]);
      }
      wgmma_fence();
      const uint64_t p = weights.at((Map::kScaledWeights ? pair * Map::kQueryChunkBytes : 0) + step * 32);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) wgmma_rs(M(), o[2 * pair + g * kTogether + j], v[group % kAhead][j].a, p, true);
      wgmma_commit();
    }
    if (i == kAll - 1) used();
  }
  wgmma_wait<0>();
}

// The last factor of row c of this thread's; read when its numbers are stored, so that few registers are in use.
template <class Map, class Control>
__device__ __forceinline__ float last_factor(const Control& control, int c) {
  return __uint_as_float(load_shared_word(shared_address(&control.result[FewLayout<Map::kRows>::row(c, block_thread() % 32)])));
}

template <class T, class Map, class Control>
__device__ __forceinline__ void store_raw_rows(const FmDecodeParams& p, const FewAccumulators<Map::kRows>& o, int half,
                                               const Control& control) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32;
  T* columns = reinterpret_cast<T*>(p.out) + half * 256 + thread / 32 * 16 + lane / 4 * 2;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const float factor = last_factor<Map>(control, c);
    const int64_t offset = control.out_offset()[Layout::row(c, lane)];
    if (offset < 0) continue;
    T* out = columns + offset;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      *reinterpret_cast<uint32_t*>(out + 64 * m) =
          pack_result(T(), o[m][Layout::value(c, 0)] * factor, o[m][Layout::value(c, 1)] * factor);
  }
}

// Partial results of 16 or 32 rows.
template <class Map, class Control>
__device__ __forceinline__ void store_raw_partial(const FmDecodeParams& p, const RowBlock& r,
                                                  const FewAccumulators<Map::kRows>& o, int half, const Control& control) {
  using Layout = FewLayout<Map::kRows>;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const float factor = last_factor<Map>(control, c);
    const int thread = opaque(warpgroup_thread()), lane = thread % 32;
    const int block_row = Layout::row(c, lane);
    if (r.row_begin + block_row >= r.rows) continue;
    float* out = p.partial_out + slot_row<Map>(p, r, block_row) * kLatent + half * 256 + thread / 32 * 16 + lane / 4 * 2;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      *reinterpret_cast<float2*>(out + 64 * m) =
          make_float2(o[m][Layout::value(c, 0)] * factor, o[m][Layout::value(c, 1)] * factor);
  }
}

// The end of a part of 16 or 32 rows, one of few. `come`: by LastAdds::comes(), how many have come before.
template <class T, class Map, class Control>
__device__ __forceinline__ void finish_or_leave_raw(const FmDecodeParams& p, int item, FewAccumulators<Map::kRows>& o, int half,
                                                    Control& control, int come) {
  using Layout = FewLayout<Map::kRows>;
  const int lane = opaque(block_thread()) % 32;
  scale_few_rows<Map::kRows>(o, control.result, lane);
  if (LastAdds<Map>::comes()) control.pieces = come;
  finish_or_leave<Map>(p, item, o, control, [&](const RowBlock&, int i, const float (&numbers)[4][4]) {
    T* columns = reinterpret_cast<T*>(p.out) + half * 256 + warpgroup_thread() / 32 * 16 + lane / 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t offset = control.out_offset()[Layout::row(2 * i + j, lane)];
      if (offset < 0) continue;
#pragma unroll
      for (int m = 0; m < 4; ++m)
        *reinterpret_cast<uint32_t*>(columns + offset + 64 * m) = pack_result(T(), numbers[m][j], numbers[m][2 + j]);
    }
  });
}

// Of 64 rows, as HalfPart.
template <class Map, class Control>
__device__ __forceinline__ void store_raw_halves(const FmDecodeParams& p, const RowBlock& r,
                                                 const FewAccumulators<Map::kRows>& o, int half, const Control& control) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = opaque(warpgroup_thread()), lane = thread % 32, chunk = thread / 32 * 8 + lane / 4;
  uint8_t* part = part_bytes<Map>(p, r);
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    if (c / 2 % 2 != 0) continue;  // rows and those 8 on together
    const int pair = c / 4 * 8 + lane % 4 * 2 + c % 2;
    uint32_t exponents = 0;
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = 0.f;
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) top = fmaxf(top, fabsf(o[m][Layout::value(c + 2 * i, h)]));
      factor[i] = last_factor<Map>(control, c + 2 * i);
      const uint32_t exponent = HalfPart::exponent(top * factor[i]);
      factor[i] *= HalfPart::inverse(exponent);
      exponents |= exponent << 8 * i;
    }
    const auto numbers = [&](int m, int i) {
      return pack(__half(), o[m][Layout::value(c + 2 * i, 0)] * factor[i], o[m][Layout::value(c + 2 * i, 1)] * factor[i]);
    };
#pragma unroll
    for (int m = 0; m < 4; m += 2)
      *reinterpret_cast<uint4*>(part + (pair * HalfPart::kPieces + half * 2 + m / 2) * kPieceBytes + chunk * 16) =
          make_uint4(numbers(m, 0), numbers(m, 1), numbers(m + 1, 0), numbers(m + 1, 1));
    *reinterpret_cast<uint16_t*>(part + HalfPart::scales_offset(pair, half, chunk)) = exponents;
  }
}

// The end of an item of 16 or 32 rows, when their last factors are known: merges them where a cluster shares the item's tiles, stores whole
// ones, and leaves or adds up parts. `own()`: the warpgroup. `come`: what LastAdds::come() has returned.
template <class T, class Map, class Own, class Control>
__device__ __forceinline__ void finish_few_raw_rows(const FmDecodeParams& p, const RowBlock& r, int item,
                                                    FewAccumulators<Map::kRows>& o, Own own, uint32_t smem, Control& control,
                                                    int come, uint32_t& parts_parity) {
  SplitUnit unit;
  if constexpr (kSharesTiles<Map>) {
    merge_parts<T, Map>(p, r, o, own(), smem, control, parts_parity);
    if (r.slot < 0) return;
    unit = load_split_unit<Map>(p, r);
  } else if (r.slot < 0) {
    store_raw_rows<T, Map>(p, o, own(), control);
    return;
  } else if (LastAdds<Map>::is_for(r.parts)) {
    finish_or_leave_raw<T, Map>(p, item, o, own(), control, come);
    return;
  } else {
    unit = load_split_unit<Map>(p, r);  // on its way while the part is stored
    store_raw_partial<Map>(p, r, o, own(), control);
  }
  finish_part_of_rows<T, Map>(p, unit, item, control);
}

}  // namespace fm
