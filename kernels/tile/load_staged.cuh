// The loader of listed rows of codes that become bfloat16 before they are multiplied: all of a tile's rows, or half of them, where the two
// CTAs of a cluster have the same tiles for different query rows. Then each sends the other what it has stored.
//
// A warp has sixteen rows of a tile (eight, if CTAs share). They come as they lie in the cache, by cp.async, in pieces of eight rows and a
// column quarter, of which the stage holds four: three are on their way while one is converted, or two and two, if CTAs share.
// An e4m3 number is a bfloat16, and so are its product with a power of two from 2^-124 on (below it numbers are off by less than 2^-133)
// and that of an e2m1 and an e4m3 number: nothing else is rounded, and no row needs a unit.
//
// CTAs that share follow both from the team's number. A row that is there may still be read by its copy to the other CTA:
// nobody changes one before that CTA has said that it is used up, as nobody has to where no query token sees less than another.
#pragma once
#include <cuda_bf16.h>
#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "coded_rows.cuh"
#include "codes.cuh"
#include "raw_e2m1.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"
#include "work.cuh"

namespace fm {

// Eight e4m3 codes times a number of two bfloat16, NaN where either is.
__device__ __forceinline__ uint4 e4m3_to_bf16(uint2 codes, uint32_t factor) {
  return bf16_times(half_to(__nv_bfloat16(), e4m3_to_half(codes)), factor);
}
// A UE8M0 scale, and an e4m3 one times 2^6, twice as a bfloat16.
__device__ __forceinline__ uint32_t ue8m0_factor(uint32_t scale) { return __byte_perm(ue8m0_bits(scale), 0, 0x3232); }
__device__ __forceinline__ uint32_t e2m1_factor(uint32_t scale) {
  constexpr uint32_t kTwoTo6 = 0x42804280u;
  return multiply_bf16(half_to(__nv_bfloat16(), e4m3_to_half(scale * 0x0101u, 0u)).x, kTwoTo6);
}

// Whether rows are e2m1 codes, where some may be.
template <class Map>
__device__ __forceinline__ bool is_e2m1(int format) {
  return Map::kE2m1 && format == FM_KV_FP4_V41;
}

// Where this lane's row of a tile is: in units of 16 bytes from the cache's beginning, and bytes from there to its scales. An absent
// one is the cache's first. Without a branch: who waits for one lane waits for all.
struct RowPlace {
  uint32_t row, after;
  bool here;

  template <class Map>
  __device__ __forceinline__ RowPlace(const FmKvCache& kv, const TileCursor<Map>& at) {
    const unsigned size = kv.page_size, page = page_column(kv, at.found), offset = page_offset(kv, at.found);
    here = at.found >= 0 && page < (unsigned)kv.num_pages;
    row = here ? (uint32_t)(kv.row_stride[0] >> 4) * page + (uint32_t)(kv.row_stride[1] >> 4) * offset : 0;
    const bool of_64 = kv.format == FM_KV_FP8_V4, at_page_end = of_64 || kv.format == FM_KV_FP8_V41_SPLIT;
    const uint32_t bytes = of_64 ? 576 : 512, scales = of_64 ? 8 : 16;
    after = !here ? 0 : at_page_end ? (size - offset) * bytes + offset * scales : bytes;
  }
};

// A warp's rows on their way through its stage. Eight lanes have a row of a piece and the one four on, 16 bytes each: two pieces of 16 bytes
// of a row of bfloat16, of which every second lane's group takes the second one first, so that those of eight lanes are in banks of
// their own, and so are the codes of two rows.
template <class Map>
struct StagedRows {
  using Stage = typename Map::Stage;
  static constexpr int kRows = Map::kStageRows, kGroups = kRows / kPieceRows;  // of eight rows
  static constexpr int kOwn = 2, kApart = kPieceRows / kOwn;
  static constexpr uint32_t kPieceBytes = sizeof(Stage::piece[0]), kTailBytes = sizeof(Stage::tail[0]), kScaleBytes = sizeof(Stage::scales[0][0]);
  uint32_t stage;                       // this lane's 16 bytes of its first row in the first piece
  const uint8_t* cache;                 // where they come from, ...
  uint32_t row;                         // ... this lane's RowPlace::row, which lanes tell each other
  uint32_t present;                     // bit i: row i of the warp is there; if CTAs share, those of the other one follow

  static __device__ __forceinline__ int lane() { return TokenWarps<Map>::lane(); }
  static __device__ __forceinline__ int lane_piece() { return lane() % 8; }
  static __device__ __forceinline__ int upper() { return lane() / 4 % 2; }  // whether the columns are of a quarter's second chunk
  static __device__ __forceinline__ int second() { return (lane() / 4 ^ lane() / 8) & 1; }  // whether the second piece is taken first
  static __device__ __forceinline__ uint32_t warp_stage(uint32_t smem) {
    return smem + Map::kStageOffset + TokenWarps<Map>::warp() * sizeof(Stage);
  }
  static __device__ __forceinline__ uint32_t scales_of(uint32_t smem, int turn, int row) {
    return warp_stage(smem) + offsetof(Stage, scales) + (turn * kRows + row) * kScaleBytes;
  }
  // Where a quarter of a group's rows is.
  template <int Quarter, int Group>
  static __device__ __forceinline__ constexpr uint32_t piece() {
    return (Quarter * kGroups + Group) % kStagePieces * kPieceBytes;
  }
  // From this lane's bytes in the first piece to its first row's tail.
  __device__ __forceinline__ uint32_t tail() const {
    return stage - lane_piece() * 16 - lane() / 8 * kBlockWidth + offsetof(Stage, tail) + lane() / 8 * kTailBytes;
  }

  __device__ __forceinline__ explicit StagedRows(uint32_t smem) : stage(warp_stage(smem) + lane() / 8 * kBlockWidth + lane_piece() * 16) {}

  // To the rows of a tile, `own` being that of this lane: those of this CTA, then those of the other one. Asks for their scales.
  __device__ __forceinline__ void begin(const FmKvCache& kv, const RowPlace& own, uint32_t smem, int turn) {
    cache = reinterpret_cast<const uint8_t*>(kv.rows);
    row = own.row;
    present = __ballot_sync(~0u, own.here);
    if (kv.format == FM_KV_FP8 || is_e2m1<Map>(kv.format) || lane() >= kRows) return;
    const uint8_t* scales = at_sixteenth(cache, own.row) + own.after;
    if (kv.format == FM_KV_FP8_V4)
      cp_async_8(scales_of(smem, turn, lane()), scales, own.here);
    else
      cp_async_16(scales_of(smem, turn, lane()), scales, own.here);
  }
  __device__ __forceinline__ bool has(int i) const { return present >> (lane() / 8 + i * kApart) & 1; }
  // Asks for a piece. Rows of fp8_v4 have 64 bytes more; of fp4_v41 half as many, and scales of two quarters follow these.
  template <int Quarter, int Group>
  __device__ __forceinline__ void ask(int format) const {
    constexpr int kFirst = Group * kOwn;
    const bool e2m1 = is_e2m1<Map>(format);
    const uint8_t* from[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      from[i] = at_sixteenth(cache, __shfl_sync(~0u, row, lane() / 8 + (kFirst + i) * kApart) + lane_piece());
    const int at = !e2m1 ? Quarter * kBlockWidth
                         : lane_piece() < 4 ? Quarter * (kBlockWidth / 2) : kLatent / 2 - 64 + Quarter / 2 * 16;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (!e2m1 || lane_piece() < 5)
        cp_async_16(stage + piece<Quarter, Group>() + i * kApart * kBlockWidth, from[i] + at, has(kFirst + i));
    if (Quarter == kTileBlocks - 1 && format == FM_KV_FP8_V4) {  // four lanes have those of a row, the next four those of the one four on
      const int i = upper();
      cp_async_16(tail() + (Group * kPieceRows + i * kApart) * kTailBytes + lane_piece() % 4 * 16,
                  (i ? from[1] : from[0]) + (kLatent - i * 64), has(kFirst + i));
    }
    cp_async_commit();
  }

  // Turns a piece to bfloat16, at `to`: this lane's first 16 bytes of its first row. `scales`: of that row, from this lane's on. e2m1 codes
  // become e4m3 ones of 2^-6 of their numbers (raw_e2m1.cuh).
  template <int Quarter, int Group>
  __device__ __forceinline__ void convert(int format, uint32_t scales, uint32_t to) const {
    const bool of_64 = format == FM_KV_FP8_V4;
    const uint32_t at = stage + piece<Quarter, Group>();
    uint2 codes[kOwn][2];
    uint32_t factor[kOwn];
    if (is_e2m1<Map>(format)) {
      const uint32_t first = (at - lane_piece() * 8) | second() * 4, scale = at - lane_piece() * 15 + 64 + Quarter % 2 * 8;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        codes[i][0] = e2m1_to_e4m3(load_shared_word(first + i * kApart * kBlockWidth));
        codes[i][1] = e2m1_to_e4m3(load_shared_word((first ^ 4) + i * kApart * kBlockWidth));
        factor[i] = e2m1_factor(load_shared_byte(scale + i * kApart * kBlockWidth));
      }
    } else {
      const uint32_t first = at | second() * 8, scale = scales + Group * (kPieceRows * kScaleBytes) + Quarter * (of_64 ? 2 : 4);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        codes[i][0] = load_shared_8(first + i * kApart * kBlockWidth);
        codes[i][1] = load_shared_8((first ^ 8) + i * kApart * kBlockWidth);
        factor[i] = ue8m0_factor(format == FM_KV_FP8 ? 127 : load_shared_byte(scale + i * kApart * kScaleBytes));
      }
    }
    uint4 v[kOwn][2];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) v[i][j] = e4m3_to_bf16(codes[i][j], factor[i]);
    if (Quarter == kTileBlocks - 1 && of_64 && upper()) {  // the last 64 columns of fp8_v4 are bfloat16
      const bool in_tail = lane_piece() >= 6;
      const uint32_t apart = kApart * (in_tail ? kTailBytes : kBlockWidth);
      const uint32_t plain = (in_tail ? tail() + Group * (kPieceRows * kTailBytes) + (lane_piece() - 6) * 32 : at + (lane_piece() - 4) * 16) | second() * 16;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) v[i][j] = load_shared_4((plain ^ j * 16) + i * apart);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        store_shared((to ^ (j * 16 | i * 64)) + (Group * kGroupBytes + i * (kApart * kChunkRowBytes)), v[i][j]);
  }
};

// Hands on the warp's rows of two blocks, `first` and `second`: to the other CTA, too, if the two share.
template <class Map>
__device__ __forceinline__ void hand_on(uint32_t first, uint32_t second, const uint64_t& full) {
  fence_async_shared();
  if constexpr (Map::kShare == 2) {
    __syncwarp();
    send_to_pair(first, second, kGroupBytes, shared_address(&full), cluster_rank() ^ 1);
  } else {
    arrive_once_per_warp(shared_address(&full));
  }
}

template <int QkDim, class Map>
__device__ __forceinline__ void load_staged(const FmDecodeParams& p, const FirstItem& first, uint32_t smem, DecodeControl& control) {
  using Rows = StagedRows<Map>;
  constexpr bool kPairs = Map::kShare == 2;
  constexpr int kGroups = Rows::kGroups;
  static_assert(QkDim == kLatent && TokenWarps<Map>::kRows == kTileTokens / kLoadingWarps && TokenWarps<Map>::kWarps == kLoadingWarps);
  TilePlace<Map> place;
  TileCursor<Map> cursor;  // a tile ahead
  cursor.begin(p, first);
  cursor.prefetch_entries(p);
  wait_for_earlier_launches();
  cursor.start(p);
  bool going = !cursor.done();
  Rows rows(smem);
  int next = 1;  // of the tile that is asked for: its format, and its turn in the lowest bit
  const auto begin_next = [&] {
    const FmKvCache& kv = p.kv[cursor.cache];
    next = kv.format << 1 | (~next & 1);
    rows.begin(kv, RowPlace(kv, cursor), smem, next & 1);
  };
  // Asks for one of the pieces that the stage holds, of a tile from its first quarter on.
  const auto ask = [&](auto which) {
    constexpr int kPiece = decltype(which)::value;
    rows.template ask<kPiece / kGroups, kPiece % kGroups>(next >> 1);
  };
  constexpr std::integral_constant<int, 0> zero{};
  constexpr std::integral_constant<int, 1> one{};
  constexpr std::integral_constant<int, 2> two{};
  constexpr std::integral_constant<int, 3> three{};
  begin_next();
  cursor.advance(p);
  ask(zero), ask(one), ask(two), ask(three);
  // The warp's rows in a block, and this lane's first 16 bytes of the first one.
  const uint32_t group = uniform(smem + ((kPairs ? cluster_rank() * kLoadingWarps : 0) + TokenWarps<Map>::warp() * kGroups) * kGroupBytes);
  const uint32_t own = latent_swizzled(Rows::lane() / 8, Rows::lane_piece() * 2 + Rows::second());
  static_assert(kGroupBytes == kPieceRows * 2 * kBlockWidth);
#pragma unroll 1
  while (going) {
    const int format = next >> 1, turn = next & 1;
    const uint32_t present = rows.present;
    const auto convert_half = [&](auto first_quarter) {
      constexpr int kFirst = decltype(first_quarter)::value;
      const uint32_t scales = Rows::scales_of(smem, turn, Rows::lane() / 8) +
                              (format == FM_KV_FP8_V4 ? Rows::upper() : Rows::lane_piece() / 2);
      const int block[2] = {place.block(kFirst), place.block(kFirst + 1)};
      // The lower half's place is free when that of its last quarter is, the upper one's when the tile's weights are used up, too.
      const auto wait_for_place = [&] {
        if (kFirst == 0)
          mbarrier_wait(shared_address(&control.block_empty[block[1]]), place.block_parity(1) ^ 1);
        else
          mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
      };
      if constexpr (kPairs) {
        cp_async_wait<2>();
        __syncwarp();
        wait_for_place();
        rows.template convert<kFirst, 0>(format, scales, group + block_offset(block[0]) + own);
        rows.template convert<kFirst + 1, 0>(format, scales, group + block_offset(block[1]) + own);
      } else {
        // Each piece is asked for anew from two quarters on, which the next tile has when the second half's turn is.
        const auto turn_piece = [&](auto q, auto g) {
          constexpr int kQuarter = kFirst + decltype(q)::value, kGroup = decltype(g)::value;
          cp_async_wait<kStagePieces - 1>();
          __syncwarp();
          if (kQuarter == kFirst && kGroup == 0) wait_for_place();
          rows.template convert<kQuarter, kGroup>(format, scales, group + block_offset(block[kQuarter - kFirst]) + own);
          __syncwarp();
          rows.template ask<(kQuarter + 2) % kTileBlocks, kGroup>(next >> 1);
        };
        turn_piece(zero, zero), turn_piece(zero, one), turn_piece(one, zero), turn_piece(one, one);
      }
      if (kFirst > 0) {  // which rows of each CTA are there
        const uint32_t bits = shared_address(&control.present[place.rope()]);
        if (!kPairs && Rows::lane() == 0) store_shared_bytes<2>(bits + TokenWarps<Map>::warp() * 2, present);
        if (kPairs && Rows::lane() < 2) {
          const uint32_t rank = cluster_rank() ^ Rows::lane();
          store_shared_bytes<1>(bits + rank * kLoadingWarps + TokenWarps<Map>::warp(), present >> Rows::lane() * kPieceRows);
        }
      }
      hand_on<Map>(group + block_offset(block[0]), group + block_offset(block[1]), control.block_full[block[1]]);
    };
    convert_half(zero);
    begin_next();
    going = !cursor.done();
    if constexpr (kPairs) ask(zero), ask(one);
    cursor.advance(p);
    convert_half(two);
    if constexpr (kPairs) ask(two), ask(three);
    place.advance();
  }
  cp_async_wait<0>();
  static_assert(!Map::frees(0) && Map::frees(1) && !Map::frees(2) && !Map::frees(3));
  if constexpr (kPairs) wait_until_used_up<Map>(control, place, 1, true);
}

}  // namespace fm
