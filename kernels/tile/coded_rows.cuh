// Quantised rows on their way to shared memory: codes in registers, stored as halves. A token's row counts in a power of
// two of its own (RowUnit), which scores and weights are multiplied with.
#pragma once
#include <cuda_fp16.h>
#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"
#include "codes.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"

namespace fm {

// Where a quantised row's scales begin, in bytes from the row's own beginning.
__device__ __forceinline__ int scales_after(const FmKvCache& kv, int offset) {
  switch (kv.format) {
    case FM_KV_FP8_V4: return (kv.page_size - offset) * 576 + offset * 8;
    case FM_KV_FP8_V41_SPLIT: return (kv.page_size - offset) * 512 + offset * 16;
    case FM_KV_FP4_V41: return 256;
    default: return 512;
  }
}

// A tile's rows as this warp sees them: where this lane's row is. Absent rows are read as if they were the cache's first
// (loads that depend on nothing need not be waited for), and stored as zeros.
struct CodedRows {
  uint32_t row;      // in units of 16 bytes from the cache's beginning
  uint32_t other;    // rows of 576: the same of the rope part of 16-bit numbers; of 512: bytes from a row to its scales
  uint32_t present;  // bit i: row i of the warp is there
  int cache;

  // Of row `which` of the warp: `from`, which is in the cache's first row, moved to it.
  __device__ __forceinline__ const uint8_t* address(const uint8_t* from, int which) const {
    return at_sixteenth(from, __shfl_sync(~0u, row, which));
  }
};

// Where a lane stores what it has of a tile's rows 0 .. 3 of its warp, by shared address.
template <class Map>
struct LanePlaces {
  uint32_t codes;  // the first of its two pieces of row 0, of the first half of the columns; four blocks on the second
  uint32_t rope;   // its piece of row lane / 8
  uint32_t block;  // the same of columns 448 .. 512
  uint32_t unit;   // what that row counts in

  __device__ __forceinline__ LanePlaces(uint32_t smem, TilePlace<Map> place) {
    const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row(), row = first_row + lane / 8;
    static_assert(Map::kTriple == 0 && TokenWarps<Map>::kRows % 8 == 0);
    codes = smem + block_offset(place.block(lane / 16)) + latent_swizzled(first_row, lane % 16);
    rope = smem + Map::rope_offset(place.rope()) + swizzled(row, lane % 8);
    block = smem + block_offset(place.block(3)) + latent_swizzled(row, 8 + lane % 8);
    unit = tile_units_at<Map>(smem, place.rope()) + row * 4;
  }
  // To the next eight rows.
  __device__ __forceinline__ void advance() {
    codes += kGroupBytes, rope += kAtomBytes, block += kGroupBytes, unit += 32;
  }
};

// A float's bits from a UE8M0 scale.
__device__ __forceinline__ uint32_t ue8m0_bits(uint32_t byte) {
  return byte == 0 ? 1u << 22 : byte == 255 ? 0x7FC00000u : byte << 23;
}

// Four rows on their way. A lane has eight columns of each half of them; and of row lane / 8, eight columns of the part
// that has no scales, and the scales of an eighth of the columns. T: of Q, and of the rope part in shared memory.
template <class T, int QkDim, class Map>
struct RowBatch {
  static constexpr int kRows = 4;
  static constexpr bool kHasRope = QkDim > kLatent;

  // Eight codes. With which of the two types the compiler copies none that are on their way differs.
  using Eight = typename std::conditional<kHasRope, uint2, uint64_t>::type;

  Eight codes[kRows][2];
  uint4 plain = {0, 0, 0, 0};  // bfloat16; or e4m3 codes, of two lanes
  uint32_t scales;             // as they are in memory, of as many lanes as share a word

  __device__ __forceinline__ void load(const FmDecodeParams& p, const CodedRows& rows, int first) {
    const int format = p.kv[rows.cache].format, lane = TokenWarps<Map>::lane(), eighth = lane % 8;
    const uint8_t* cache = reinterpret_cast<const uint8_t*>(p.kv[rows.cache].rows);
    // What lies after the codes of fp8_v4 is read, too. Rows of fp4_v41, which are not converted here, are shorter.
    const uint8_t* column = cache + (!kHasRope && format == FM_KV_FP4_V41 ? lane % 4 : lane) * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* at = rows.address(column, first + i);
      load_8(codes[i][0], at), load_8<256>(codes[i][1], at);
    }
    const uint8_t* own = rows.address(cache, first + lane / 8);
    if constexpr (kHasRope) {
      plain = load_16(own + (format == FM_KV_FP8 ? 512 + eighth / 2 * 16 : 528 + eighth * 16));
      scales = load_4<512>(own + eighth / 2 * 4);
    } else {
      const int words = format == FM_KV_FP8_V4 ? eighth / 4 : eighth / 2;
      const int at = format == FM_KV_FP8 ? 0 : (int)__shfl_sync(~0u, rows.other, first + lane / 8) + words * 4;
      load_16_if<448>(format == FM_KV_FP8_V4, plain, own + eighth * 16);
      scales = load_4(own + at);
    }
  }

  // The rows 4 Which .. 4 Which + 4 of eight, of which those of the bits of `present` are there. Collects what scales
  // have besides powers of two in `mantissas`.
  template <int Which>
  __device__ __forceinline__ void store(int format, uint32_t present, LanePlaces<Map> to, uint32_t& mantissas) {
    const int lane = TokenWarps<Map>::lane();
    if ((present & 15) != 15) clear_absent(present);
    float unit = 1.f;
    if constexpr (kHasRope) {
      if (format == FM_KV_FP8)
        store_rope_codes<Which>(to);
      else
        unit = take_float_scales<Which>(to, mantissas);
    } else if (format != FM_KV_FP8) {
      unit = take_exponents<Which>(format, to);
    }
    store_shared_if(lane % 8 == 0, to.unit + 16 * Which, present >> lane / 8 & 1 ? unit : 0.f);
    store_codes<Which>(format, to);
  }

 private:
  // Piece `at` of rows 0 .. 3 of eight, moved on to row i of the eight: the swizzle is in bits of its own.
  static __device__ __forceinline__ uint32_t row_place(uint32_t at, int i) {
    return (at ^ (i << 4)) + i * kChunkRowBytes;
  }

  __device__ __forceinline__ void clear_absent(uint32_t present) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (!(present >> i & 1)) codes[i][0] = codes[i][1] = Eight();
    if (!(present >> TokenWarps<Map>::lane() / 8 & 1)) plain = make_uint4(0, 0, 0, 0), scales = 0;
  }

  // The rope part of row lane / 8 as T.
  template <int Which>
  __device__ __forceinline__ void store_rope_codes(const LanePlaces<Map>& to) const {
    const bool odd = TokenWarps<Map>::lane() & 1;
    const uint4 v = e4m3_to_half(odd ? plain.z : plain.x, odd ? plain.w : plain.y);
    store_shared(row_place(to.rope, 4 * Which), half_to(T(), v));
  }

  // These two make `scales` what codes are multiplied with, powers of two as a pair of halves, for the first and the
  // second half of the lane's eighth; store what is not codes; and return what row lane / 8 counts in.

  // Of a float32 scale the power of two: the rest is left beside the tile.
  template <int Which>
  __device__ __forceinline__ float take_float_scales(const LanePlaces<Map>& to, uint32_t& mantissas) {
    const int lane = TokenWarps<Map>::lane();
    uint32_t largest = scales & 0x7F800000u;
#pragma unroll
    for (int d = 2; d < 8; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const RowUnit unit(RowUnit::of_largest_code(largest));
    store_shared(row_place(to.rope, 4 * Which), rope_as(T(), plain, unit.inverse_pair()));
    const uint32_t fraction = scales & 0x7FFFFFu;
    mantissas |= fraction;
    // NaN stays NaN.
    const uint32_t mantissa = (scales & 0x7FFFFFFFu) > 0x7F800000u ? scales : fraction | 0x3F800000u;
    store_shared_if(lane % 2 == 0,
                    to.unit + offsetof(Units::OfTile, mantissa) + lane % 8 / 2 * (kTileTokens * 4) + 16 * Which,
                    __uint_as_float(mantissa));
    const float scale = __uint_as_float(scales & 0xFF800000u) * unit.inverse();
    scales = pack(__half(), scale, scale);
    return unit.unit();
  }

  template <int Which>
  __device__ __forceinline__ float take_exponents(int format, const LanePlaces<Map>& to) {
    const bool has_rope = format == FM_KV_FP8_V4;
    const int eighth = TokenWarps<Map>::lane() % 8;
    const uint32_t pair = scales >> (has_rope ? eighth % 4 * 8 : eighth % 2 * 16);
    uint32_t scale[2] = {ue8m0_bits(pair & 0xFF), ue8m0_bits(pair >> 8 & 0xFF)};
    if (has_rope) scale[1] = scale[0] = eighth == 7 ? 0 : scale[0];
    uint32_t largest = RowUnit::of_largest_code(max(scale[0], scale[1]));
    if (has_rope) largest = max(largest, largest_bf16(plain));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const RowUnit unit(largest);
    scales = pack(__half(), __uint_as_float(scale[0]) * unit.inverse(), __uint_as_float(scale[1]) * unit.inverse());
    if (has_rope) store_shared(row_place(to.block, 4 * Which), bf16_to_half(plain, unit.inverse_pair()));
    return unit.unit();
  }

  template <int Which>
  __device__ __forceinline__ void store_codes(int format, const LanePlaces<Map>& to) const {
    const int lane = TokenWarps<Map>::lane();
    const bool second = kHasRope || format != FM_KV_FP8_V4 || lane < 24;  // the last columns may not be codes
    const auto put = [&](int i, uint4 a, uint4 b) {
      const uint32_t at = row_place(to.codes, 4 * Which + i);
      store_shared(at, a);
      store_shared_if(second, at + 4 * kBlockBytes, b);
    };
    const int from = kHasRope ? lane / 16 * 2 : lane / 8;  // the eighth with the lane's first scale; four on the second
    if (format == FM_KV_FP8) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        put(i, e4m3_to_half(codes[i][0]), e4m3_to_half(codes[i][1]));
    } else {
      const uint32_t half = !kHasRope && lane & 4 ? 0x3232 : 0x1010;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto scale = [&](int which) {
          const uint32_t pair = __shfl_sync(~0u, scales, i * 8 + from + which);
          return kHasRope ? pair : __byte_perm(pair, 0, half);
        };
        put(i, scaled(e4m3_to_half(codes[i][0]), scale(0)), scaled(e4m3_to_half(codes[i][1]), scale(4)));
      }
    }
  }
};

// Whether some scale of this warp's rows is not a power of two.
template <class Map>
__device__ __forceinline__ void leave_scaled(uint32_t smem, TilePlace<Map> place, bool scaled) {
  scaled = __any_sync(~0u, scaled);
  constexpr int kShare = 8 / TokenWarps<Map>::kWarps;
  const uint32_t at = smem + Map::kUnitsOffset + offsetof(Units, scaled) + place.rope() * 8;
  if (TokenWarps<Map>::lane() == 0) store_shared_bytes<kShare>(at + TokenWarps<Map>::warp() * kShare, scaled);
}

// Loads and stores this warp's rows of fp4_v41: codes of 512 columns, and an e4m3 scale for each sixteen of them. Not in
// batches on the way, for registers are short: this format is that of extra caches.
template <class Map>
__device__ __forceinline__ void convert_e2m1_rows(const FmDecodeParams& p, const CodedRows& rows, uint32_t smem,
                                                  TilePlace<Map> place) {
  const int lane = TokenWarps<Map>::lane();
  const uint8_t* cache = reinterpret_cast<const uint8_t*>(p.kv[rows.cache].rows);
  const uint32_t of_tile = tile_units_at<Map>(smem, place.rope());
#pragma unroll 1
  for (int first = 0; first < TokenWarps<Map>::kRows; first += 4) {
    uint32_t codes[4][2], scales[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* row = rows.address(cache, first + i);
      codes[i][0] = load_4(row + lane * 4), codes[i][1] = load_4<128>(row + lane * 4);
      scales[i][0] = load_4<256>(row + lane / 8 * 4), scales[i][1] = load_4<272>(row + lane / 8 * 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool present = rows.present >> (first + i) & 1;
      const int row = TokenWarps<Map>::first_row() + first + i;
      const uint32_t at = smem + block_offset(place.block(lane / 16)) + latent_swizzled(row, lane % 16);
      store_shared_if(lane == 0, of_tile + row * 4, present ? 1.f : 0.f);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t scale = e4m3_to_half(__byte_perm(scales[i][j], 0, lane / 2 % 4 * 0x1111)).x;
        const uint4 v = present ? scaled(e2m1_to_half(codes[i][j]), scale) : make_uint4(0, 0, 0, 0);
        store_shared(at + j * 4 * kBlockBytes, v);
      }
    }
  }
}

// Turns this warp's rows, which are in shared memory as they are in a bf16 or fp16 cache, into halves; a bf16 rope part
// only counts in the same unit.
template <int QkDim, class Map>
__device__ __forceinline__ void convert_copied_rows(uint32_t smem, TilePlace<Map> place, uint32_t present, bool bf16) {
  const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row();
  const uint32_t of_tile = tile_units_at<Map>(smem, place.rope());
#pragma unroll 1
  for (int i = 0; i < TokenWarps<Map>::kRows; ++i) {
    const int row = first_row + i;
    float unit = 1.f;
    if (bf16) {
      const uint32_t at = smem + block_offset(place.block(lane / 16)) + latent_swizzled(row, lane % 16);
      const uint32_t rope = smem + Map::rope_offset(place.rope()) + swizzled(row, lane % 8);
      const uint4 a = load_shared_4(at), b = load_shared_4(at + 4 * kBlockBytes);
      const RowUnit of_row(__reduce_max_sync(~0u, max(largest_bf16(a), largest_bf16(b))));
      store_shared(at, bf16_to_half(a, of_row.inverse_pair()));
      store_shared(at + 4 * kBlockBytes, bf16_to_half(b, of_row.inverse_pair()));
      if (QkDim > kLatent && lane < 8) store_shared(rope, bf16_times(load_shared_4(rope), of_row.inverse_pair()));
      unit = of_row.unit();
    }
    if (lane == 0) store_shared(of_tile + row * 4, present >> i & 1 ? unit : 0.f);
  }
}

}  // namespace fm
