// Rows of codes that have come, before they are multiplied: what rows count in and the scales of K relative to that (tile_full); and then the
// scales of V and the part of a row that is not codes, as it will be multiplied, which is last (rest_full). Rows that are absent become
// zeros. By two of the loader's warps (raw_rows.cuh). Of bare rows, which are codes throughout, nothing is prepared.
#pragma once
#include <cuda_fp16.h>
#include <stddef.h>
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "coded_rows.cuh"
#include "codes.cuh"
#include "numbers.cuh"
#include "raw_e2m1.cuh"
#include "raw_map.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"
#include "work.cuh"

namespace fm {

// Of a warp. Where these are 16, which only rows beside e2m1 codes have, two lanes share one.
template <class Map>
constexpr int kPreparedRows = kTileTokens / Map::kPreparingWarps;

// Rows of a preparing warp that are absent become zeros: few of them one after another, by all lanes, many by a lane each.
template <class Map>
__device__ __forceinline__ void clear_absent_rows(uint32_t smem, int place, int warp, uint32_t present) {
  if (present == ~0u) return;
  const auto clear = [&](int token, uint32_t i) {
    if (i < Map::kRowBytes) store_shared(Map::row(smem, place, kPreparedRows<Map> * warp + token) + i, make_uint4(0, 0, 0, 0));
  };
  if (__popc(present) < 20) {
    const int lane = TokenWarps<Map>::lane();
#pragma unroll 1
    for (uint32_t i = present >> lane & 1 ? Map::kRowBytes : 0; i < Map::kRowBytes; i += 16) clear(lane, i);
  } else {
#pragma unroll 1
    for (uint32_t absent = ~present; absent != 0; absent &= absent - 1) {
      const int token = __ffs(absent) - 1;
      clear(token, TokenWarps<Map>::lane() * 16), clear(token, 512 + TokenWarps<Map>::lane() * 16);
    }
  }
  __syncwarp();
}

// A lane's row when it has come: what it counts in, its scales, what of it is not codes.
template <class Map>
struct RowPreparation {
  // Lanes that have a row, and scales of e4m3 codes that each sees to, two to a word.
  static constexpr int kLanes = 32 / kPreparedRows<Map>, kPairs = (Map::kFine ? 8 : Map::kGroups / 2) / kLanes;
  static_assert(kLanes == 1 || Map::kFine);
  uint32_t row, scales;  // shared addresses
  int token;
  bool present;
  // Which of these lanes this is.
  static __device__ __forceinline__ int lane_share() { return kLanes == 1 ? 0 : TokenWarps<Map>::lane() / kPreparedRows<Map>; }
  // Of what the row's lanes have found, the largest.
  static __device__ __forceinline__ uint32_t largest_of_lanes(uint32_t v) {
    return kLanes == 1 ? v : max(v, __shfl_xor_sync(~0u, v, 32 / kLanes));
  }

  __device__ __forceinline__ void leave_unit(RowUnit unit) const {
    store_shared(scales + offsetof(typename Map::Scales, unit) + token * 4, present ? unit.over(Map::kUnitLog2).unit() : 0.f);
  }
  // The scales of groups for the scores, pairs of halves; Alike: two of one number each.
  template <bool Alike = false>
  __device__ __forceinline__ void leave_of_token(const uint32_t (&halves)[kPairs]) const {
    const uint32_t to = scales + token * Map::Scales::kTokenBytes;
    if constexpr (Map::kFine) {
#pragma unroll
      for (int i = 0; i < kPairs / 2; ++i) {
        const auto twice = [&](int j) { return __byte_perm(halves[2 * i + j / 2], 0, j % 2 ? 0x3232 : 0x1010); };
        store_shared(to + 16 * (lane_share() * (kPairs / 2) + i), make_uint4(twice(0), twice(1), twice(2), twice(3)));
      }
    } else if constexpr (Map::kGroups == 4) {
      store_shared(to, make_uint2(halves[0], halves[1]));
    } else {
#pragma unroll
      for (int i = 0; i < Map::kGroups / 8; ++i) {
        const uint32_t* v = halves + 4 * i;
        if constexpr (Map::kTwice) {
          const auto twice = [&](int j) { return Alike ? v[j / 2] : __byte_perm(v[j / 2], 0, j % 2 ? 0x3232 : 0x1010); };
          store_shared(to + 32 * i, make_uint4(twice(0), twice(1), twice(2), twice(3)));
          store_shared(to + 32 * i + 16, make_uint4(twice(4), twice(5), twice(6), twice(7)));
        } else {
          store_shared(to + 16 * i, make_uint4(v[0], v[1], v[2], v[3]));
        }
      }
    }
  }
  // And for the values.
  __device__ __forceinline__ void leave_of_value(const uint32_t (&halves)[kPairs]) const {
    const uint32_t to = Map::value_scale(scales, 0, opaque(token));
    const auto store = [&](int group, uint32_t half) {
      store_shared_bytes<2>(to + group * (kTileTokens * 2), present ? half & 0xFFFF : 0);
    };
    if constexpr (Map::kFine) {  // those that leave_of_token has left
      constexpr int kShare = Map::kGroups / kLanes;
#pragma unroll 1
      for (int j = 0; j < kShare; j += 8) {
        const int i = lane_share() * kShare + j;
        const uint4 v = load_shared_4(scales + token * Map::Scales::kTokenBytes + i * 2);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 8; ++k) store(i + k, words[k / 2] >> k % 2 * 16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Map::kGroups; ++i) store(i, halves[i / 2] >> i % 2 * 16);
    }
  }

  // Where P is multiplied with them: so that none is more than one (RawMap::kResultUnitLog2).
  static constexpr float kShrink = common_unit<Map>() / result_unit<Map>();
  __device__ __forceinline__ void leave_of_weights(const float (&scale)[4]) const {
    float large[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool small = fabsf(scale[i]) < 0x1p-14f;  // as a half it would lose bits
      large[i] = small ? scale[i] * 0x1p14f : scale[i], rest[i] = small ? 0x1p-14f : 1.f;
    }
    const auto pair = [&](const float (&v)[4], int i) { return present ? pack(__half(), v[i], v[i + 1]) : 0; };
    store_shared(Map::value_scale(scales, 0, token), make_uint4(pair(large, 0), pair(large, 2), pair(rest, 0), pair(rest, 2)));
  }
  // Those that halves hold.
  __device__ __forceinline__ void leave_value_scales(const uint32_t (&pairs)[2]) const {
    if constexpr (Map::kScaledWeights) {
      const uint32_t shrink = pack(__half(), kShrink, kShrink), one = pack(__half(), 1.f, 1.f);
      const auto pair = [&](int i) { return present ? multiply_halves(pairs[i], shrink) : 0; };
      store_shared(Map::value_scale(scales, 0, token), make_uint4(pair(0), pair(1), one, one));
    } else {
      leave_of_value({pairs[0], pairs[1]});
    }
  }

  // Rows of 576: their unit and scales for the scores, `pairs`; returns whether scales are more than powers of two.
  __device__ __forceinline__ bool prepare_scales(int format, RowUnit& unit, uint32_t (&pairs)[2]) const {
    if (format == FM_KV_FP8) {
      unit = RowUnit::power(0);
      leave_unit(unit);
      pairs[0] = pairs[1] = 0x3C003C00u;
      leave_of_token({pairs[0], pairs[1]});
      return false;
    }
    const uint4 v = load_shared_4(row + Map::kFloatScales);
    const uint32_t scale[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0, fractions = 0, beyond = 0;
    float power[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = max(largest, scale[i] & 0x7F800000u), fractions |= scale[i] & 0x7FFFFFu;
      beyond |= RowUnit::beyond(scale[i]);
    }
    const bool common = beyond == 0 && largest < 124 * RowUnit::kOne;
    unit = common ? RowUnit::power(Map::kUnitLog2) : RowUnit(RowUnit::of_largest_code(largest));
#pragma unroll
    for (int i = 0; i < 4; ++i) power[i] = __uint_as_float(scale[i] & 0xFF800000u) * unit.inverse();
    if (Map::kSumsOfBlocks && largest == 0x7F800000u) {  // an infinite scale of a block's sum would make minus infinity of some scores
#pragma unroll
      for (int i = 0; i < 4; ++i) power[i] += power[i] - power[i];  // NaN of an infinite one
    }
    pairs[0] = pack(__half(), power[0], power[1]), pairs[1] = pack(__half(), power[2], power[3]);
    leave_of_token({pairs[0], pairs[1]});
    leave_unit(unit);
    return present && fractions != 0;
  }
  // And their scales for the values, when the scores may begin. `fractions`: some row of the warp's has more than powers of two; `units`:
  // or another unit than the common one.
  __device__ __forceinline__ void prepare_value_scales(int format, RowUnit unit, const uint32_t (&pairs)[2], bool fractions,
                                                       bool units) const {
    if (!fractions && !(Map::kScaledWeights && units && format != FM_KV_FP8)) {
      leave_value_scales(pairs);
      return;
    }
    const uint4 v = load_shared_4(row + Map::kFloatScales);
    const auto scale = [&](uint32_t bits) { return __uint_as_float(bits) * unit.inverse(); };
    if constexpr (Map::kScaledWeights)
      leave_of_weights({scale(v.x) * kShrink, scale(v.y) * kShrink, scale(v.z) * kShrink, scale(v.w) * kShrink});
    else
      leave_of_value({pack(__half(), scale(v.x), scale(v.y)), pack(__half(), scale(v.z), scale(v.w))});
  }
  // Their rope part. T: of Q. Where it counts in the row's unit the factor between the common one and one is with Q, so that rows that
  // count in that have theirs as it is.
  template <class T>
  __device__ __forceinline__ void prepare_rope(int format, RowUnit unit) const {
    const uint32_t factor = unit.over(Map::kUnitLog2).inverse_pair();
    if (format == FM_KV_FP8) {
      uint4 codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = load_shared_4(row + 512 + 16 * i);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_shared(row + Map::kRope + 32 * i, rope_from(T(), e4m3_to_half(codes[i].x, codes[i].y), factor));
        store_shared(row + Map::kRope + 32 * i + 16, rope_from(T(), e4m3_to_half(codes[i].z, codes[i].w), factor));
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 8; i += 4) {  // four pieces under way
      uint4 piece[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) piece[j] = load_shared_4(row + Map::kRope + 16 * (i + j));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        store_shared(row + Map::kRope + 16 * (i + j), rope_as(T(), piece[j], factor));
    }
  }

  // Rows of 512: their unit and scales for the scores; `pairs` are also those for the values.
  __device__ __forceinline__ void prepare_latent(int format, RowUnit& unit, uint32_t (&pairs)[kPairs]) const {
    unit = RowUnit::power(Map::kUnitLog2);
    if (Map::kFine && format == FM_KV_FP4_V41) {  // of which halves hold all products
      expand_e2m1_row<kLanes>(row, scales + token * Map::Scales::kTokenBytes, lane_share());
    } else if (format == FM_KV_FP8) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] = 0x3C003C00u;
      leave_of_token(pairs);
    } else if (Map::kMayBePlain && format == FM_KV_FP8_V4) {  // seven scales, of two groups each
      const float2 v = load_shared_2(row + Map::kScalesAfterPlain);
      const uint32_t words[2] = {__float_as_uint(v.x), __float_as_uint(v.y)};
      const uint32_t beyond = (RowUnit::bytes_beyond(words[1]) & 0xFFFFFFu) | RowUnit::bytes_beyond(words[0]);
      if (__any_sync(~0u, present & ((beyond != 0) | !plain_in_range()))) {
        scales_with_plain(words, unit, pairs);
      } else {
#pragma unroll
        for (int i = 0; i < kPairs - 1; ++i) pairs[i] = common_scales(__byte_perm(words[i / 4], 0, 0x4040 + i % 4 * 0x0101));
      }
      pairs[kPairs - 1] = 0;
      leave_of_token<true>(pairs);
    } else {
      uint32_t words[4 / kLanes], beyond = 0;
      if constexpr (kLanes == 1) {
        const uint4 v = load_shared_4(row + Map::kScales);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      } else {
        const float2 v = load_shared_2(row + Map::kScales + 8 * lane_share());
        words[0] = __float_as_uint(v.x), words[1] = __float_as_uint(v.y);
      }
#pragma unroll
      for (int i = 0; i < 4 / kLanes; ++i) beyond |= RowUnit::bytes_beyond(words[i]);
      if (__any_sync(~0u, present && beyond != 0)) {
        scales_of_groups(words, unit, pairs);
      } else {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) pairs[i] = common_scales(__byte_perm(words[i / 2], 0, i % 2 ? 0x4342 : 0x4140));
      }
      leave_of_token(pairs);
    }
    leave_unit(unit);
  }
  // Two bytes of exponents, in the halves of a word, as halves: 2^-14 up to 2.
  static __device__ __forceinline__ uint32_t common_scales(uint32_t bytes) { return bytes * (1u << 10) - (112u << 26 | 112u << 10); }
  // Whether the last columns may count in one: they lose nothing, or little beside their largest. That is between an eighth of the
  // root of the sum of their squares and all of it.
  __device__ __forceinline__ bool plain_in_range() const {
    uint32_t squares[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      uint4 piece[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) piece[j] = load_shared_4(row + Map::kPlain + 16 * (i + j));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        squares[0] = add_square_bf16(add_square_bf16(squares[0], piece[j].x), piece[j].y);
        squares[1] = add_square_bf16(add_square_bf16(squares[1], piece[j].z), piece[j].w);
      }
    }
    const float2 a = unpack(__nv_bfloat16(), squares[0]), b = unpack(__nv_bfloat16(), squares[1]);
    const float sum = (a.x + a.y) + (b.x + b.y);
    return sum >= 0x1p-6f && sum <= 0x1p28f;
  }
  static __device__ __forceinline__ uint32_t scale_byte(uint32_t word, int i) { return word >> i % 4 * 8 & 0xFF; }
  // As halves, one after another: registers are short.
  static __device__ __forceinline__ uint32_t scales_over(uint32_t& inverse_unit, uint32_t first, uint32_t second) {
    const auto over = [&](uint32_t byte) { return __uint_as_float(ue8m0_bits(byte)) * __uint_as_float(inverse_unit); };
    uint32_t pair = pack(__half(), over(first), over(second));
    asm volatile("" : "+r"(pair), "+r"(inverse_unit));
    return pair;
  }
  // A warp's rows of which some do not count in one: what this one counts in and its scales relative to that.
  __device__ __forceinline__ void scales_with_plain(const uint32_t (&words)[2], RowUnit& unit, uint32_t (&pairs)[kPairs]) const {
    uint32_t top = 0, largest = 0;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) largest = max(largest, largest_bf16(load_shared_4(row + Map::kPlain + 16 * i)));
#pragma unroll
    for (int i = 0; i < 7; ++i) top = max(top, scale_byte(words[i / 4], i));
    unit = RowUnit(max(largest, RowUnit::of_largest_code(ue8m0_bits(top) & 0x7F800000u)));
    uint32_t inverse = __float_as_uint(unit.inverse());
#pragma unroll
    for (int i = 0; i < kPairs - 1; ++i) {
      const uint32_t byte = scale_byte(words[i / 4], i);
      pairs[i] = scales_over(inverse, byte, byte);
    }
  }
  __device__ __forceinline__ void scales_of_groups(const uint32_t (&words)[4 / kLanes], RowUnit& unit, uint32_t (&pairs)[kPairs]) const {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) top = max(top, scale_byte(words[i / 4], i));
    unit = RowUnit(RowUnit::of_largest_code(ue8m0_bits(largest_of_lanes(top)) & 0x7F800000u));
    uint32_t inverse = __float_as_uint(unit.inverse());
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = scales_over(inverse, scale_byte(words[i / 2], 2 * i), scale_byte(words[i / 2], 2 * i + 1));
  }
  // Their last columns, where these are not codes. `units`: some row of the warp's does not count in one.
  __device__ __forceinline__ void prepare_plain(RowUnit unit, bool units) const {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = row + Map::kPlain + 32 * i;
      uint4 a = load_shared_4(at), b = load_shared_4(at + 16);
      if (units) a = bf16_times(a, unit.inverse_pair()), b = bf16_times(b, unit.inverse_pair());
      const uint2 even[2] = {even_bf16_to_half(a), even_bf16_to_half(b)}, odd[2] = {odd_bf16_to_half(a), odd_bf16_to_half(b)};
      store_shared(at, make_uint4(even[0].x, even[0].y, even[1].x, even[1].y));
      store_shared(at + 16, make_uint4(odd[0].x, odd[0].y, odd[1].x, odd[1].y));
    }
  }
};

// The tiles of this CTA's worker.
template <class Map>
__device__ __forceinline__ int count_tiles(const FmDecodeParams& p, const FirstItem& first) {
  int tiles = 0;
  for_each_row_block<Map>(p, first, [&](int, const RowBlock& r) { tiles += r.tiles(); });
  return tiles;
}

// By a preparing warp: tile after tile. With few rows an item's tiles when it is its turn, so that the first begins early; with 64
// registers are too short for the item, and all tiles are counted beforehand.
template <class T, class Map, class Control>
__device__ __forceinline__ void prepare_rows(const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                             Control& control) {
  constexpr int kRows = kPreparedRows<Map>;
  const int warp = (unsigned)block_thread() / 32 % Map::kPreparingWarps, lane = TokenWarps<Map>::lane();
  wait_for_earlier_launches();
  RawPlace<Map> place;
  const auto prepare_next = [&] {
    const int at = place.at();
    mbarrier_wait(shared_address(&control.landed[at][warp]), place.parity());
    const int format = control.format[at], token = kRows * warp + (kRows == 32 ? lane : lane % kRows);
    const uint32_t all = load_present<kRows>(control.present[at], warp) | (kRows == 32 ? 0 : ~0u << kRows % 32);  // lanes beyond: as if there
    clear_absent_rows<Map>(smem, at, warp, all);
    const bool present = all >> (kRows == 32 ? TokenWarps<Map>::lane() : TokenWarps<Map>::lane() % kRows) & 1;
    const RowPreparation<Map> row = {Map::row(smem, at, token), Map::scales(smem, at), token, present};
    RowUnit unit(0);
    const auto leave_scaled = [&](bool fractions) {
      const bool units = __any_sync(~0u, present && !unit.is_power(Map::kUnitLog2));
      if (lane == 0) control.scaled[at][warp] = fractions * kFractions + units * kUnits;
      return units;
    };
    if constexpr (Map::kHasRope) {
      uint32_t pairs[2];
      const bool fractions = __any_sync(~0u, row.prepare_scales(format, unit, pairs)), units = leave_scaled(fractions);
      arrive_once_per_warp(shared_address(&control.tile_full[at]));
      row.prepare_value_scales(format, unit, pairs, fractions, units);
      if (!kRopeCounts<T> || units) row.template prepare_rope<T>(format, unit);
    } else {
      uint32_t pairs[RowPreparation<Map>::kPairs];
      row.prepare_latent(format, unit, pairs);
      const bool units = leave_scaled(false);
      arrive_once_per_warp(shared_address(&control.tile_full[at]));
      row.leave_of_value(pairs);
      if (Map::kMayBePlain && format == FM_KV_FP8_V4) row.prepare_plain(unit, units);
    }
    fence_async_shared();  // before the next copies to the place
    arrive_once_per_warp(shared_address(&control.rest_full(at)));
    place.advance();
  };
  if constexpr (Map::kFewRows) {
    for_each_row_block<Map>(p, first, [&](int, const RowBlock& r) {
#pragma unroll 1
      for (int tiles = r.tile_end - r.tile_begin; tiles > 0; --tiles) prepare_next();
    });
  } else {
#pragma unroll 1
    for (int tiles = count_tiles<Map>(p, first); tiles > 0; --tiles) prepare_next();
  }
}

}  // namespace fm
