// Shared memory of a CTA that keeps quantised rows as they lie in the cache (raw_rows.cuh) and turns codes to halves on
// their way to the tensor cores (raw_scores.cuh, raw_values.cuh):
//
//   Q as halves, and its rope part, in chunks of 64 columns; each 16 columns in the order of raw_query.cuh
//   places of a tile's weights P, [rows][64 tokens]; where these have the scales of V, one for each block of 128 columns
//   instead of those two, between items with fewer than 64 rows: what warpgroups hand over (raw_independent.cuh), and this
//     CTA's part of rows that the cluster merges
//   places of a tile's rows of bytes, kRowBytes apart
//   places of a tile's scales, RawScales
//   control block, RawControl
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/shared.cuh"
#include "shared_map.cuh"

namespace fm {

constexpr int kRawBarrier = 1;  // named barrier of both computing warpgroups
constexpr int kOwnBarrier = 3;  // those of each, two
constexpr float kNoReference = 3e38f;  // minus a reference that every score exceeds

// What numbers of a tile count in. A row's is a power of two, so that halves hold its numbers; scales are relative to it.
// Weights: P is multiplied with those of V.
template <int Groups, bool Twice, bool Weights>
struct alignas(16) RawScales {
  // Each half once; or twice, as products need it. Where those of a token fill banks, the next one's begin 16 bytes on.
  static constexpr uint32_t kTokenBytes = Twice ? Groups * 4 + 16 : Groups == 32 ? Groups * 2 + 16 : Groups * 2;
  uint8_t of_token[kTileTokens][kTokenBytes];  // -> scores: powers of two
  uint16_t of_value[Groups * (Weights ? 2 : 1) * kTileTokens];  // -> values, or P: whole scales, halves, where RawMap::value_scale says
  float unit[kTileTokens];                  // what the row counts in, over what rows mostly do; 0: absent
};

// Where a token's scales lie so that each lane of the values role has its own together: tokens 16 step + 2 j + {0, 1, 8, 9},
// j = lane % 4, are one after another, those of all four steps.
__device__ __forceinline__ int lane_token(int token) {
  return token % 8 / 2 * 16 + token / 16 * 4 + token / 8 % 2 * 2 + token % 2;
}

// Bare: rows are codes alone, without scales. Fine: some have scales of 16 columns, and come as e2m1 codes (raw_e2m1.cuh); none has
// columns that are not codes.
template <int Rows, int QkDim, bool Bare, bool Fine, int Cluster>
struct RawMap {
  static constexpr bool kBare = Bare, kFine = Fine;
  static constexpr int kCluster = Cluster, kShare = 0, kRows = Rows, kPlaces = Rows == kTileRows ? 3 : 4;
  static constexpr bool kTokens = true, kCodes = true, kRaw = true, kPeaks = true, kFewRows = Rows < kTileRows,
                        kHandsQueryOn = false, kShortOfRegisters = true;
  static constexpr bool kSteps = false;
  // Whether 64 rows have up to 64 pieces (split_rows.cuh). With scales the compiler orders the loop of tiles anew then: b=128 takes 3 to 5 % longer.
  static constexpr bool kManyPieces = kBare;
  // Whether a computing warpgroup has whole tiles (raw_independent.cuh), or half of the columns of all (raw_together.cuh).
  // With 32 rows and scales that is as fast or slower (docs/tried-sparse.md, "Whole tiles"); without scales registers are tight.
  static constexpr bool kIndependent = Rows == 16 || (Rows == 32 && Bare), kTight = Rows == 32 && kIndependent;
  static constexpr bool kHasRope = QkDim > kLatent;
  // Warps that ask for rows, and that prepare them (raw_rows.cuh): of one warpgroup or, where computing leaves registers for it, of two, the
  // second of which prepares. What few rows take is the way of a tile through all of these (docs/tried-loop.md, "More warps that load").
  static constexpr int kAskingWarps = kFewRows && (Bare || !kHasRope) ? 4 : 2, kPreparingWarps = Bare ? 0 : kFewRows && Fine ? 4 : 2;
  static constexpr int kLoaders = kAskingWarps + kPreparingWarps > 4 ? 2 : 1;
  static constexpr bool kFloatScaled = kHasRope && !kBare;  // by blocks of 128 columns
  // Whether P is multiplied with the scales of V, once for each block, instead of V: fewer instructions with few query rows, but P takes four
  // times the memory. With 32 rows that costs a place of rows, or two of P (docs/tried-loop.md, "Scales by way of P").
  static constexpr bool kScaledWeights = kFloatScaled && Rows == 16, kScaledValues = !kBare && !kScaledWeights;
  static constexpr int kWeightCopies = kScaledWeights ? 4 : 1;
  static constexpr bool kSwizzled = kBare && Rows == FM_SWIZZLED_ROWS;  // rows that come in boxes; RowLayout
  // Whether rows may come in boxes. Those of 512 columns with scales never do, but without that branch the compiler orders the loop of warps that
  // ask anew, which has lists of `fp8_v41` take 3 % longer.
  static constexpr bool kBoxes = !Fine;
  static constexpr bool kMayBePlain = !kHasRope && !kBare && !kFine;  // the last columns of V may be halves
  // Whether it is found while a cluster's parts are waited for where rows go: worth 4 % for few requests, and 1 % for `fp8` with
  // 16 rows.
  static constexpr bool kEarlyEnds = Rows == 16;
  // Whether what a thread's places of all tiles have in common stays in registers; rows that come in boxes have too much of it.
  static constexpr bool kKeepsPlaces = kFewRows && !kSwizzled;
  static constexpr bool kSumsOfBlocks = kFloatScaled && kFewRows;  // of products of K (raw_products.cuh)
  // What rows mostly count in, as a power of two, and the units of others are relative to. Halves hold all bits of codes with float32
  // scales of 2^-15 up to 2^-3 that count in 2^-10, of codes with powers of two of 2^-14 up to 2 that count in one.
  static constexpr int kUnitLog2 = kFloatScaled ? -10 : 0;
  // What accumulators mostly count in: P times a scale is no more than P.
  static constexpr int kResultUnitLog2 = kUnitLog2 + (kScaledWeights ? 7 : 0);
  static constexpr int kGroups = kHasRope ? 4 : kFine ? 32 : 16;  // of columns
  static constexpr int kKeyGroups = (kBare ? QkDim : kLatent) / 32;  // of 32 columns of K that are codes
  // How much is under way at a time, as registers allow: groups of 32 columns of K that are multiplied while the next ones are
  // converted, and groups of products of V, each with a block of 64 columns; groups and pairs of blocks whose codes are being loaded.
  static constexpr int kKeysAhead = kFewRows && !kTight ? 4 : 2, kKeyCodesAhead = Rows == 16 && kScaledValues ? 1 : 2;
  static constexpr int kValuesTogether = Rows == 16 ? 1 : 2, kValuesAhead = 4 / kValuesTogether;
  static constexpr int kValueCodesAhead = kFewRows && !kTight ? 3 : 2;
  // Of a row: an odd multiple of 16, for ldmatrix.
  static constexpr uint32_t kRowBytes =
      kBare ? QkDim + FM_BARE_ROW_GAP : kHasRope ? FM_RAW_ROW_BYTES_576 : kFine ? kLatent + 16 : FM_RAW_ROW_BYTES_512;
  // Rows of 576: where float32 scales lie, and the rope part as Q has it. Rows of 512: where the part that is not codes
  // begins, and where scales of the two kinds lie.
  static constexpr uint32_t kFloatScales = 512, kRope = 528;
  static constexpr uint32_t kPlain = 448, kScales = 512, kScalesAfterPlain = 576;

  static constexpr uint32_t kQueryChunkBytes = Rows * kChunkRowBytes;
  static constexpr uint32_t kQueryOffset = 0;
  static constexpr uint32_t kWeightsOffset = QkDim / 64 * kQueryChunkBytes;
  static constexpr uint32_t kPartOffset = 0;
  static constexpr uint32_t kWeightsEnd = kWeightsOffset + kPlaces * kWeightCopies * kQueryChunkBytes;
  static constexpr uint32_t kUsedBefore = kFewRows && kPartBytes > kWeightsEnd ? kPartBytes : kWeightsEnd;
  static constexpr uint32_t kCodesOffset = kSwizzled ? (kUsedBefore + kAtomBytes - 1) / kAtomBytes * kAtomBytes : kUsedBefore;
  static constexpr bool kTwice = Rows == kTileRows && !kHasRope && !kFine;  // scales of K are stored twice
  using Scales = RawScales<kGroups, kTwice, kScaledWeights>;
  static constexpr uint32_t kScalesOffset = kCodesOffset + kPlaces * kTileTokens * kRowBytes;
  static constexpr uint32_t kControlOffset = kScalesOffset + kPlaces * sizeof(Scales);

  static __device__ __forceinline__ uint32_t weights(uint32_t smem, int place) {
    return smem + kWeightsOffset + place * (kWeightCopies * kQueryChunkBytes);
  }
  static __device__ __forceinline__ uint32_t row(uint32_t smem, int place, int token) {
    return smem + kCodesOffset + (place * kTileTokens + token) * kRowBytes;
  }
  static __device__ __forceinline__ uint32_t scales(uint32_t smem, int place) {
    return smem + kScalesOffset + place * sizeof(Scales);
  }
  // Where V's scale of a group of columns and a token lies, as lane_token says; where P is multiplied with them those of a token together,
  // followed by powers of two of which each has one as a factor, too: a half alone does not hold the smallest.
  static __device__ __forceinline__ uint32_t value_scale(uint32_t scales, int group, int token) {
    const int i = kScaledWeights ? token * (2 * kGroups) + group : group * kTileTokens + lane_token(token);
    return scales + offsetof(Scales, of_value) + i * 2;
  }
};

// What scales make necessary: factors between products (raw_products.cuh), as some are not powers of two; and units other than the common one.
constexpr uint32_t kFractions = 1, kUnits = 2;

// What a thread needs to find its operands of a tile in a place: found once, for the first place, or anew each time, as `find(place)` does.
template <class Map, class Find>
__device__ __forceinline__ auto places(Find find) {
  if constexpr (Map::kKeepsPlaces)
    return [first = find(0)](int place) { return first.plus(place); };
  else
    return find;
}

// What rows mostly count in.
template <class Map>
__device__ __forceinline__ constexpr float common_unit() {
  return 1.f / (1 << -Map::kUnitLog2);
}
// What accumulators mostly count in.
template <class Map>
__device__ __forceinline__ constexpr float result_unit() {
  return 1.f / (1 << -Map::kResultUnitLog2);
}
// One over the common unit, twice, as bfloat16.
template <class Map>
__device__ __forceinline__ constexpr uint32_t common_unit_inverse_pair() {
  return (uint32_t)(127 - Map::kUnitLog2 << 7) * 0x10001u;
}

// What the rows of a thread's two tokens count in, relative to Map::kUnitLog2: powers of two, or 0 where they are absent; 1 where all of
// the tile's do or are absent.
struct OwnUnits {
  float of[2] = {1.f, 1.f};
  bool needed = false;

  __device__ __forceinline__ float log2(int h) const { return (float)((int)(__float_as_uint(of[h]) >> 23) - 127); }  // -127 of 0
  // One over it; of 0, for which there is no weight, a finite number.
  __device__ __forceinline__ float inverse(int h) const { return __uint_as_float((254u << 23) - __float_as_uint(of[h])); }
};
template <class Map>
__device__ __forceinline__ OwnUnits load_own_units(uint32_t smem, int place, uint32_t scaled) {
  if (Map::kBare || !(scaled & kUnits)) return {};
  const uint32_t at = Map::scales(smem, place) + offsetof(typename Map::Scales, unit) +
                      (warpgroup_thread() / 32 * 16 + warpgroup_thread() % 32 / 4) * 4;
  return {{__uint_as_float(load_shared_word(at)), __uint_as_float(load_shared_word(at + 32))}, true};
}

// Where the codes of rows are in a place. Rows that come in boxes where these are swizzled: each box has its columns in blocks of
// 128, one after another, with the 128-byte swizzle; the last 64 columns of rows of 576 follow all of the tile's, with the 64-byte
// one. Other rows lie kRowBytes apart, each as it is.
template <class Map>
struct RowLayout {
  static constexpr uint32_t kTail = kTileTokens * kLatent;
  int shift;  // of a box's rows; negative: none

  __device__ __forceinline__ bool boxed() const { return Map::kSwizzled && shift >= 0; }
  __device__ __forceinline__ uint32_t block_stride() const { return boxed() ? 128u << shift : 128u; }
  // A row's first block.
  __device__ __forceinline__ uint32_t row(int token) const {
    return boxed() ? (token >> shift << shift) * kLatent + (token & ((1 << shift) - 1)) * 128 : token * Map::kRowBytes;
  }
  // What the offset of 16 bytes in a block is XORed with, and that of 16 bytes in a tail.
  __device__ __forceinline__ uint32_t swizzle(int token) const { return boxed() ? token % 8 * 16 : 0; }
  __device__ __forceinline__ uint32_t tail_swizzle(int token) const { return boxed() ? token / 2 % 4 * 16 : 0; }
  // The columns that follow.
  __device__ __forceinline__ uint32_t tail(int token) const {
    return boxed() ? kTail + token * 64 : token * Map::kRowBytes + kLatent;
  }
  // Where the sixteen bytes from byte `i` of a row on are, of a tile in that place.
  __device__ __forceinline__ uint32_t piece(uint32_t smem, int place, int token, uint32_t i) const {
    if (!Map::kSwizzled) return Map::row(smem, place, token) + i;
    const bool first = i < kLatent;
    return Map::row(smem, place, 0) + (first ? row(token) + i / 128 * block_stride() + (i % 128 ^ swizzle(token))
                                             : tail(token) + (i - kLatent ^ tail_swizzle(token)));
  }
};

// What warpgroups tell each other besides. Independent ones have rows of their own.
// Preparing: warps that prepare rows.
template <int Rows, int Preparing, bool Independent = false>
struct alignas(16) RawControl : std::conditional<Rows == kTileRows, DecodeControl, FewControl>::type {
  alignas(16) float2 row[Rows];  // what the row's scores are multiplied with, base 2; minus its reference
  static constexpr int kKept = Independent ? 1 : Rows;
  float warp_top[4][kKept];      // what each warp found for a row
  float warp_peak[4][kKept];     // and its highest score so far
  static constexpr int kParts = Preparing > 0 ? Preparing : 1;  // of a tile
  uint64_t landed[kTiles][kParts];  // copies -> preparing warps
  uint32_t scaled[kTiles][kParts];  // preparing warps -> scores, of their rows: kFractions, kUnits
  int32_t format[kTiles];       // asking warps -> others

  __device__ __forceinline__ uint32_t scaled_tile(int place) const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) all |= scaled[place][i];
    return all;
  }

  // Preparing warps -> scores: the scales of V, and what of a tile's rows is not codes. The barrier of a block elsewhere.
  __device__ __forceinline__ uint64_t& rest_full(int place) { return this->block_full[place]; }

  // Where a row goes in the output, in elements, when its scores are no longer needed; negative: nowhere.
  __device__ __forceinline__ int64_t* out_offset() { return reinterpret_cast<int64_t*>(row); }
  __device__ __forceinline__ const int64_t* out_offset() const { return reinterpret_cast<const int64_t*>(row); }

  // At the beginning of an item: what the row's scores are multiplied with.
  __device__ __forceinline__ void begin_row(int of, float scale) { row[of] = make_float2(scale, kNoReference); }
};

// What of that each of two independent warpgroups has for itself, by the same names.
template <int Rows>
struct alignas(16) OwnRows {
  alignas(16) float2 row[Rows];
  float warp_top[4][Rows], warp_peak[4][Rows];
  float factor[1][Rows];  // of its accumulators, where references have moved
};
template <int Rows, int Preparing>
struct IndependentControl : RawControl<Rows, Preparing, true> {
  OwnRows<Rows> own[2];

  __device__ __forceinline__ void begin_row(int of, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i].row[of] = make_float2(scale, kNoReference);
  }
};

// Where a tile is: tiles take turns in the places.
template <class Map>
struct RawPlace {
  static constexpr unsigned kLast = Map::kPlaces - 1;
  unsigned state = 0;  // the place, and above its two bits the parity of its barriers: they are read more often than moved on

  __device__ __forceinline__ int at() const { return state & 3; }
  __device__ __forceinline__ uint32_t parity() const { return state >> 2; }
  __device__ __forceinline__ void advance() {
    state = kLast == 3 ? (state + 1) & 7 : at() == kLast ? ~state & 4 : state + 1;
  }
  // Of the tile that many on.
  __device__ __forceinline__ RawPlace plus(int tiles) const {
    static_assert(kLast == 3);
    RawPlace r;
    r.state = (state + tiles) & 7;
    return r;
  }
  // Of the tile before.
  __device__ __forceinline__ RawPlace last() const {
    RawPlace r;
    r.state = kLast == 3 ? (state - 1) & 7 : at() == 0 ? (~state & 4) | kLast : state - 1;
    return r;
  }
};

}  // namespace fm
