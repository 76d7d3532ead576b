// S^T = K Q^T of raw rows: 64 tokens on the M side, query rows on the N side. K comes from shared memory as codes and is
// converted in registers (raw_fragments.cuh), as far as it is codes: a rope part may be 16-bit numbers.
//
// Float32 scales are of blocks of 128 columns. With 16 and 32 rows each block has a sum of its own (Map::kSumsOfBlocks), which is multiplied with
// them in the end. With 64 rows, for which that takes too many registers, K is multiplied with their powers of two as other rows are with their
// scales, and, where they have mantissas, the one sum that there is with factors after each block (`Factors`).
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/wgmma.cuh"
#include "codes.cuh"
#include "few_softmax.cuh"
#include "numbers.cuh"
#include "raw_fragments.cuh"
#include "raw_map.cuh"
#include "shared_map.cuh"

namespace fm {

// The first column of k16 step k of a group. Where blocks have sums of their own, steps take turns with these.
template <class Map, int Group>
__device__ __forceinline__ constexpr int key_column(int k) {
  return Map::kSumsOfBlocks ? Group % 2 * 256 + k * 128 + Group / 2 * 16 : Group * 32 + k * 16;
}

// This warp's place in a tile.
template <class Map>
struct KeyPlace {
  uint32_t matrices;   // this lane's row and half of a group, for ldmatrix
  uint32_t own;        // float32 scales of token lane / 4
  uint32_t scales;     // of it; token 8 on: 8 of them on
  uint32_t all[2][2];  // where there are four
  uint32_t block_stride, swizzle, tail, tail_swizzle;  // of rows that may be swizzled

  __device__ __forceinline__ KeyPlace(uint32_t smem, int place, int box_shift) {
    const int lane = warpgroup_thread() % 32, first = warpgroup_thread() / 32 * 16;
    const int token = first + lane % 16;
    if constexpr (Map::kSwizzled) {
      const RowLayout<Map> layout = {box_shift};
      matrices = Map::row(smem, place, 0) + layout.row(token), tail = Map::row(smem, place, 0) + layout.tail(token);
      block_stride = layout.block_stride();
      swizzle = layout.swizzle(token) ^ lane / 16 * 16, tail_swizzle = layout.tail_swizzle(token) ^ lane / 16 * 16;
    } else {
      matrices = Map::row(smem, place, token) + lane / 16 * (Map::kSumsOfBlocks ? 128 : 16);
    }
    own = Map::row(smem, place, first + lane / 4) + Map::kFloatScales;
    scales = Map::scales(smem, place) + (first + lane / 4) * Map::Scales::kTokenBytes;
  }
  // Of a tile that many places on.
  __device__ __forceinline__ KeyPlace plus(int places) const {
    static_assert(!Map::kSwizzled, "the tail's place is not moved");
    KeyPlace r = *this;
    const uint32_t rows = places * (kTileTokens * Map::kRowBytes);
    r.matrices += rows, r.own += rows, r.scales += places * (uint32_t)sizeof(typename Map::Scales);
    return r;
  }
  // The powers of two of float32 scales of this thread's tokens, pairs of halves, when they are there.
  __device__ __forceinline__ void load_all_scales() {
    if constexpr (Map::kFloatScaled) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 v = load_shared_2(scales + h * 64);
        all[h][0] = __float_as_uint(v.x), all[h][1] = __float_as_uint(v.y);
      }
    }
  }
  // Where 32 columns are: in a row or, where blocks have sums of their own, 16 of two blocks.
  template <int Group>
  __device__ __forceinline__ uint32_t group() const {
    if constexpr (Map::kSumsOfBlocks) return matrices + key_column<Map, Group>(0);
    if constexpr (!Map::kSwizzled) return matrices + Group * 32;
    if constexpr (Group < 16) return matrices + Group / 4 * block_stride + (Group % 4 * 32 ^ swizzle);
    return tail + (Group % 4 * 32 ^ tail_swizzle);
  }
  // Of the rope part, whose 16-bit numbers are in order.
  __device__ __forceinline__ uint32_t rope() const {
    return matrices + Map::kRope - (Map::kSumsOfBlocks ? warpgroup_thread() % 32 / 16 * 112 : 0);
  }
  // The scales of k16 step k of a group, as pairs, of token lane / 4 and that 8 on; `loaded` is what load_scales gave: the scales of
  // both steps, where these have their own.
  template <int Group>
  __device__ __forceinline__ uint2 scales_of(int k, const uint32_t (&loaded)[2]) const {
    if constexpr (Map::kFine) {
      const uint32_t of_step = k == 0 ? 0x1010 : 0x3232;
      return make_uint2(__byte_perm(loaded[0], 0, of_step), __byte_perm(loaded[1], 0, of_step));
    }
    return make_uint2(loaded[0], loaded[1]);
  }
  template <int Group>
  __device__ __forceinline__ void load_scales(uint32_t (&scale)[2]) const {
    constexpr int kGroup = Group * Map::kGroups / 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t of_token = scales + h * 8 * Map::Scales::kTokenBytes;
      if constexpr (Map::kTwice || Map::kFine) {
        scale[h] = load_shared_word(of_token + (Map::kFine ? Group : kGroup) * 4);
      } else {
        const uint32_t v = Map::kHasRope ? all[h][kGroup / 2 % 2] : load_shared_word(of_token + kGroup / 2 * 4);
        scale[h] = __byte_perm(v, 0, kGroup % 2 ? 0x3232 : 0x1010);
      }
    }
  }
  // Of blocks, when load_all_scales has been called. `fractions`: they may be more than powers of two.
  __device__ __forceinline__ void load_block_scales(float (&block)[4], int h, bool fractions) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = unpack(__half(), all[h][i]);
      block[2 * i] = pair.x, block[2 * i + 1] = pair.y;
    }
    if (!fractions) return;
    const uint4 v = load_shared_4(own + h * 8 * Map::kRowBytes);
    const uint32_t whole[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] *= mantissa_of(whole[i]);
  }
  // Where there is one sum: what it is multiplied with after block `Block` of 128 columns, its mantissa over the next one's, so that
  // in the end each product has its own block's.
  template <int Block>
  __device__ __forceinline__ float factor(int h) const {
    const uint32_t from = own + h * 8 * Map::kRowBytes + Block * 4;
    const float mantissa = mantissa_of(load_shared_word(from));
    return Block == 3 ? mantissa : __fdividef(mantissa, mantissa_of(load_shared_word(from + 4)));
  }
};

// Calls body with the constants 0 .. Count.
template <int Count, class Body>
__device__ __forceinline__ void for_each_constant(Body body) {
  if constexpr (Count > 0) {
    for_each_constant<Count - 1>(body);
    body(std::integral_constant<int, Count - 1>());
  }
}

// This warp's place in a tile's rope part, where that is multiplied by itself.
template <class Map>
struct RopePlace {
  uint32_t from;

  __device__ __forceinline__ RopePlace(uint32_t smem, int place) {
    const int lane = warpgroup_thread() % 32;
    from = Map::row(smem, place, warpgroup_thread() / 32 * 16 + lane % 16) + lane / 16 * 16 + Map::kRope;
  }
  __device__ __forceinline__ uint32_t rope() const { return from; }
};

// The products of the rope part, which are added to `s` or begin it. `at`: KeyPlace or RopePlace. `rest`: waits for it.
template <class T, class Map, class Place, class Rest>
__device__ __forceinline__ void multiply_rope(float (&s)[Map::kRows / 2], uint64_t q, const Place& at, bool add,
                                              Rest rest) {
  rest();
  KeyFragments keys[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    keys[i].load_plain(at.rope() + i * 64);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k)
      wgmma_rs(T(), s, keys[i].a[k], q + (8 * Map::kQueryChunkBytes + i * 64 + k * 32) / 16, add || i + k > 0);
    wgmma_commit();
  }
}

// Sums that products are added to in turn, as many as measured best (docs/tried-sparse.md, "Sums in turn"). Those of blocks are followed by
// that of the rope part.
template <class Map>
constexpr int kTurns = Map::kSumsOfBlocks           ? 4
                       : Map::kRows == kTileRows    ? 1
                       : Map::kBare                 ? (Map::kRows == 16 ? 4 : 1)
                                                    : 2;
template <class Map>
using KeySums = float[kTurns<Map> + Map::kSumsOfBlocks][Map::kRows / 2];

// Whether K is multiplied with scales, not sums.
template <class Map>
constexpr bool kScaledKeys = !Map::kBare && !Map::kSumsOfBlocks;

// Codes of 32 columns on their way from shared memory, and their scales.
template <class Map>
struct KeyCodes {
  uint32_t codes[4], scale[2];

  template <int Group>
  __device__ __forceinline__ void load(const KeyPlace<Map>& at) {
    load_matrices<false>(codes, at.template group<Group>());
    if constexpr (kScaledKeys<Map>) at.template load_scales<Group>(scale);
  }
};

// S^T of the 32 columns `Group`, added up to what the others made.
template <class M, class Map, int Group, int Ahead>
__device__ __forceinline__ void multiply_group(KeySums<Map>& s, KeyFragments (&keys)[Ahead],
                                               KeyCodes<Map> (&codes)[Map::kKeyCodesAhead + 1], uint64_t q,
                                               const KeyPlace<Map>& at, bool plain) {
  constexpr bool kMixed = Map::kMayBePlain && Group >= 14;
  KeyFragments& own = keys[Group % Ahead];
  constexpr int kNext = Group + Map::kKeyCodesAhead, kCodes = Map::kKeyCodesAhead + 1;
  if constexpr (kNext < Map::kKeyGroups) codes[kNext % kCodes].template load<kNext>(at);
  if (Group >= Ahead) wgmma_wait<Ahead - 1>();
  const auto& loaded = codes[Group % kCodes];
  uint2 scale[2] = {};
  if constexpr (kScaledKeys<Map>)
    scale[0] = at.template scales_of<Group>(0, loaded.scale), scale[1] = at.template scales_of<Group>(1, loaded.scale);
  own.template convert<kMixed, kScaledKeys<Map>>(loaded.codes, scale);
  if (kMixed && plain) own.load_plain(at.matrices + Map::kPlain + (Group - 14) * 64);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int column = key_column<Map, Group>(k), turn = 2 * Group + k;
    wgmma_rs(M(), s[turn % kTurns<Map>], own.a[k],
             q + (column / 64 * Map::kQueryChunkBytes + column % 64 * 2) / 16, turn >= kTurns<Map>);
  }
  wgmma_commit();
}

// Of Q. Its upper half the compiler must not know: it makes four operations a product of an addition to a constant.
template <class Map>
__device__ __forceinline__ uint64_t query_descriptor(uint32_t smem) {
  const uint64_t from = smem_descriptor(smem + Map::kQueryOffset, 0, kAtomBytes);
  return (uint64_t)uniform(opaque((int)(from >> 32))) << 32 | uniform((uint32_t)from);
}

// The products of a tile, of all of a row that its unit is for. Factors: sums are multiplied with those of mantissas. `rest` waits for
// what of the rows is not codes, and says whether the last columns of rows of 512 are such.
template <class T, class M, class Map, bool Factors, class Rest>
__device__ __forceinline__ void multiply_raw(KeySums<Map>& sums, uint64_t q, const KeyPlace<Map>& at, Rest rest) {
  using Layout = FewLayout<Map::kRows>;
  static_assert(!Factors || kTurns<Map> == 1, "one sum is multiplied with factors");
  KeyFragments keys[Factors ? 1 : Map::kSumsOfBlocks && Map::kRows == 32 ? 2 : Map::kKeysAhead];
  KeyCodes<Map> codes[Map::kKeyCodesAhead + 1];
  for_each_constant<Map::kKeyCodesAhead>([&](auto number) {
    constexpr int kGroup = decltype(number)::value;
    codes[kGroup].template load<kGroup>(at);
  });
  bool plain = false;
  const auto group = [&](auto number) {
    constexpr int kGroup = decltype(number)::value;
    if constexpr (!Map::kBare && !Map::kHasRope && kGroup == 14) plain = rest();  // scales of V, too
    multiply_group<M, Map, kGroup>(sums, keys, codes, q, at, plain);
    if constexpr (Factors && kGroup % 4 == 3) {
      wgmma_wait<0>();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = at.template factor<kGroup / 4>(h);
#pragma unroll
        for (int c = 0; c < Layout::kColumns; ++c) sums[0][Layout::value(c, h)] *= factor;
      }
    }
  };
  for_each_constant<Map::kKeyGroups>(group);
  if constexpr (Map::kFloatScaled && kRopeCounts<T>)
    multiply_rope<T, Map>(sums[Map::kSumsOfBlocks ? 4 : 0], q, at, !Map::kSumsOfBlocks, rest);
  wgmma_wait<0>();
}

// Their sum: S^T.
template <class Map>
__device__ __forceinline__ void add_up(float (&s)[Map::kRows / 2], const KeySums<Map>& sums) {
#pragma unroll
  for (int i = 0; i < Map::kRows / 2; ++i) {
    s[i] = sums[0][i];
    if constexpr (kTurns<Map> > 1) s[i] += sums[1][i];
    if constexpr (kTurns<Map> == 4) s[i] += sums[2][i] + sums[3][i];
  }
}
template <class T, class Map>
__device__ __forceinline__ void add_up_blocks(float (&s)[Map::kRows / 2], const KeySums<Map>& sums,
                                              const KeyPlace<Map>& at, bool fractions) {
  using Layout = FewLayout<Map::kRows>;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float scales[4];
    at.load_block_scales(scales, h, fractions);
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) {
      const int i = Layout::value(c, h);
      s[i] = kRopeCounts<T> ? sums[4][i] : 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i] = fmaf(sums[j][i], scales[j], s[i]);
    }
  }
}

// S^T of a tile, without what Q counts in, and what rows mostly count in unless their rope part does not.
// `keys`: KeyPlace of a place.
template <class T, class M, class Map, class Control, class Keys>
__device__ __forceinline__ void multiply_raw_query(float (&s)[Map::kRows / 2], uint32_t smem, Control& control, RawPlace<Map> place,
                                                   uint32_t scaled, const OwnUnits& units, Keys keys) {
  using Layout = FewLayout<Map::kRows>;
  const int place_at = place.at();
  const auto rest = [&] {
    const int at = place.at();  // found anew: registers are short
    mbarrier_wait(shared_address(&control.rest_full(at)), place.parity());
    return !Map::kHasRope && control.format[at] == FM_KV_FP8_V4;
  };
  auto at = keys(place_at);
  at.load_all_scales();
  constexpr bool kFactors = Map::kFloatScaled && !Map::kSumsOfBlocks;
  KeySums<Map> sums;  // the same of both ways: registers
  if (kFactors && (scaled & kFractions))
    multiply_raw<T, M, Map, kFactors>(sums, query_descriptor<Map>(smem), at, rest);
  else
    multiply_raw<T, M, Map, false>(sums, query_descriptor<Map>(smem), at, rest);
  if constexpr (Map::kSumsOfBlocks)
    add_up_blocks<T, Map>(s, sums, at, scaled & kFractions);
  else
    add_up<Map>(s, sums);
  constexpr bool kRopeApart = Map::kFloatScaled && !kRopeCounts<T>;
  if (kRopeApart || (!Map::kBare && units.needed)) {
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) s[Layout::value(c, h)] *= units.of[h] * (kRopeApart ? common_unit<Map>() : 1.f);
  }
  if constexpr (kRopeApart) {
    const RopePlace<Map> at(smem, place_at);
    multiply_rope<T, Map>(s, smem_descriptor(smem + Map::kQueryOffset, 0, kAtomBytes), at, true, rest);
    wgmma_wait<0>();
  }
}

}  // namespace fm
