// The loader of listed rows of codes for pairs of CTAs, which have the same tiles for different query rows: each converts half of a
// tile's rows to bfloat16, stores them and sends what it has stored to the other.
//
// A warp has eight rows of a tile. They come as they lie in the cache, by cp.async, half of the columns as soon as those of the tile
// before are converted: so a tile is on its way while one is. Two column quarters are converted at a time. An e4m3 number is a
// bfloat16, and so are its product with a power of two from 2^-124 on (below it numbers are off by less than 2^-133) and that of an e2m1
// and an e4m3 number: nothing else is rounded, and no row needs a unit.
//
// Clusters have two CTAs, which both follow from the team's number. A row that is there may still be read by its copy to the other CTA:
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
#include "shared_map.cuh"
#include "token_cursor.cuh"
#include "work.cuh"

namespace fm {

// Eight e4m3 codes times a UE8M0 scale, NaN where either is.
__device__ __forceinline__ uint4 e4m3_to_bf16(uint2 codes, uint32_t scale_byte) {
  return bf16_times(half_to(__nv_bfloat16(), e4m3_to_half(codes)), __byte_perm(ue8m0_bits(scale_byte), 0, 0x3232));
}

// Eight e2m1 codes times an e4m3 scale, NaN where that is: their bits are placed where bfloat16 has
// exponent and fraction, which makes 2^-126 of their values, subnormal codes included.
__device__ __forceinline__ uint4 e2m1_to_bf16(uint32_t codes, uint32_t scale_byte) {
  constexpr uint32_t kTwoTo126 = 0x7E807E80u;
  const auto pair = [&](int i) {
    const uint32_t v = e2m1_pair(codes, i);
    return multiply_bf16((v & 0x00070007u) << 6 | (v & 0x00080008u) << 12, kTwoTo126);
  };
  const uint32_t scale = half_to(__nv_bfloat16(), e4m3_to_half(scale_byte * 0x0101u, 0u)).x;
  return bf16_times(make_uint4(pair(0), pair(1), pair(2), pair(3)), scale);
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
    const unsigned found = at.found, size = kv.page_size;
    unsigned page, offset;
    if (kv.page_shift >= 0)
      page = found >> kv.page_shift, offset = found & (size - 1);
    else
      page = found / size, offset = found % size;
    here = at.found >= 0 && page < (unsigned)kv.num_pages;
    row = here ? (uint32_t)(kv.row_stride[0] >> 4) * page + (uint32_t)(kv.row_stride[1] >> 4) * offset : 0;
    const bool of_64 = kv.format == FM_KV_FP8_V4, at_page_end = of_64 || kv.format == FM_KV_FP8_V41_SPLIT;
    const uint32_t bytes = of_64 ? 576 : 512, scales = of_64 ? 8 : 16;
    after = !here ? 0 : at_page_end ? (size - offset) * bytes + offset * scales : bytes;
  }
};

// A warp's rows on their way through its stage. Eight lanes have a row and the one four on, 16 bytes each of a quarter: two pieces of
// a row of bfloat16, of which lanes of the upper columns take the second one first, so that those of eight lanes are in banks of their
// own.
template <class Map>
struct StagedRows {
  static constexpr int kOwn = 2, kApart = kStageRows / kOwn;
  static constexpr uint32_t kRowBytes = sizeof(Stage::row[0]), kScaleBytes = sizeof(Stage::scales[0][0]);
  uint32_t stage;             // this lane's 16 bytes of its first row and of the first quarter
  const uint8_t* from[kOwn];  // and where they come from
  uint32_t present;           // bit i: row i of the warp is there; those of the other CTA follow

  static __device__ __forceinline__ int lane() { return TokenWarps<Map>::lane(); }
  static __device__ __forceinline__ int piece() { return lane() % 8; }
  static __device__ __forceinline__ int upper() { return lane() / 4 % 2; }  // whether the columns are of a quarter's second chunk
  static __device__ __forceinline__ uint32_t warp_stage(uint32_t smem) {
    return smem + Map::kStageOffset + TokenWarps<Map>::warp() * sizeof(Stage);
  }
  static __device__ __forceinline__ uint32_t scales_of(uint32_t smem, int turn, int row) {
    return warp_stage(smem) + offsetof(Stage, scales) + (turn * kStageRows + row) * kScaleBytes;
  }

  __device__ __forceinline__ explicit StagedRows(uint32_t smem) : stage(warp_stage(smem) + lane() / 8 * kRowBytes + piece() * 16) {}

  // To the rows of a tile, `own` being that of this lane: 8 of this CTA, then 8 of the other one. Asks for their scales.
  __device__ __forceinline__ void begin(const FmKvCache& kv, const RowPlace& own, uint32_t smem, int turn) {
    const uint8_t* cache = reinterpret_cast<const uint8_t*>(kv.rows);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      from[i] = at_sixteenth(cache + piece() * 16, __shfl_sync(~0u, own.row, lane() / 8 + i * kApart));
    present = __ballot_sync(~0u, own.here);
    if (kv.format == FM_KV_FP8 || is_e2m1<Map>(kv.format) || lane() >= kStageRows) return;
    const uint8_t* scales = at_sixteenth(cache, own.row) + own.after;
    if (kv.format == FM_KV_FP8_V4)
      cp_async_8(scales_of(smem, turn, lane()), scales, own.here);
    else
      cp_async_16(scales_of(smem, turn, lane()), scales, own.here);
  }
  __device__ __forceinline__ bool has(int i) const { return present >> (lane() / 8 + i * kApart) & 1; }
  // Asks for 16 bytes of row i: `at` and `to` from this lane's first ones, in the cache and in the stage.
  __device__ __forceinline__ void ask(int i, int at, int to) const {
    cp_async_16(stage + i * kApart * kRowBytes + to, from[i] + at, has(i));
  }
  // Asks for half of the columns, which go to a part of the stage of their own, whatever the format: what the other one has may be of
  // another tile. Rows of fp8_v4 have 64 bytes more; of fp4_v41 half as many, and 16 scales.
  template <int FirstQuarter>
  __device__ __forceinline__ void ask_for_half(int format) const {
    constexpr int kHalf = FirstQuarter * kBlockWidth;
    const bool e2m1 = is_e2m1<Map>(format);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      ask(i, e2m1 ? kHalf / 2 : kHalf, kHalf);
      if (!e2m1) ask(i, kHalf + kBlockWidth, kHalf + kBlockWidth);
      if (e2m1 && piece() == 0) ask(i, kLatent / 2 + FirstQuarter * 8, kHalf + kBlockWidth);
    }
    if (FirstQuarter > 0 && format == FM_KV_FP8_V4) {  // four lanes have those of a row, the next four those of the one four on
      const int i = upper(), at = kLatent - i * 64;
      cp_async_16(stage + i * kApart * kRowBytes + at, (i ? from[1] : from[0]) + at, has(i));
    }
    cp_async_commit();
  }

  // Turns a quarter to bfloat16, at `to`: this lane's first piece of its first row. `scales`: of that row, from this lane's on. All is
  // read before anything is stored: a store needs the registers that it is from for long, beside the products' reads of shared memory.
  template <int Quarter>
  __device__ __forceinline__ void convert(int format, uint32_t scales, uint32_t to) const {
    const bool of_64 = format == FM_KV_FP8_V4;
    uint4 v[kOwn][2];
    uint32_t scale[kOwn];
    if (is_e2m1<Map>(format)) {
      uint32_t codes[kOwn][2];
      const uint32_t half = stage - piece() * 16 + Quarter / 2 * (2 * kBlockWidth);
      const uint32_t first = (half + Quarter % 2 * (kBlockWidth / 2) + piece() * 8) | upper() * 4;
      const uint32_t at = half + kBlockWidth + Quarter % 2 * 8 + piece();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        codes[i][0] = load_shared_word(first + i * kApart * kRowBytes), codes[i][1] = load_shared_word((first ^ 4) + i * kApart * kRowBytes);
        scale[i] = load_shared_byte(at + i * kApart * kRowBytes);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) v[i][j] = e2m1_to_bf16(codes[i][j], scale[i]);
    } else {
      uint2 codes[kOwn][2];
      const uint32_t first = (stage | upper() * 8) + Quarter * kBlockWidth, at = scales + Quarter * (of_64 ? 2 : 4);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        codes[i][0] = load_shared_8(first + i * kApart * kRowBytes), codes[i][1] = load_shared_8((first ^ 8) + i * kApart * kRowBytes);
        scale[i] = 127;  // one
        if (format != FM_KV_FP8) scale[i] = load_shared_byte(at + i * kApart * kScaleBytes);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) v[i][j] = e4m3_to_bf16(codes[i][j], scale[i]);
    }
    if (Quarter == kTileBlocks - 1 && of_64 && upper()) {  // the last 64 columns of fp8_v4 are bfloat16
      const uint32_t plain = stage + Quarter * kBlockWidth + (piece() - 4) * 16;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) v[i][j] = load_shared_4(plain + i * kApart * kRowBytes + (j ^ 1) * 16);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) store_shared((to ^ (j * 16 | i * 64)) + i * (kApart * kChunkRowBytes), v[i][j]);
  }
};

template <int QkDim, class Map>
__device__ __forceinline__ void load_pairs(const FmDecodeParams& p, const FirstItem& first, uint32_t smem, DecodeControl& control) {
  using Rows = StagedRows<Map>;
  static_assert(QkDim == kLatent && TokenWarps<Map>::kRows == 2 * kStageRows && TokenWarps<Map>::kWarps == kLoadingWarps);
  TilePlace<Map> place;
  TileCursor<Map> cursor;  // a tile ahead
  cursor.begin(p, first);
  cursor.prefetch_entries(p);
  wait_for_earlier_launches();
  cursor.start(p);
  bool going = !cursor.done();
  Rows rows(smem);
  int turn = 1, next_format = FM_KV_FP8;
  const auto begin_next = [&] {
    const FmKvCache& kv = p.kv[cursor.cache];
    turn ^= 1, next_format = kv.format;
    rows.begin(kv, RowPlace(kv, cursor), smem, turn);
    rows.template ask_for_half<0>(next_format);
  };
  begin_next();
  cursor.advance(p);
  rows.template ask_for_half<2>(next_format);
  // The warp's rows in a block, and this lane's first piece of the first one.
  const uint32_t group = uniform(smem + (cluster_rank() * kLoadingWarps + TokenWarps<Map>::warp()) * kGroupBytes);
  const uint32_t own = latent_swizzled(Rows::lane() / 8, Rows::piece() * 2 + Rows::upper());
  static_assert(kGroupBytes == kStageRows * 2 * kBlockWidth);
#pragma unroll 1
  while (going) {
    const int format = next_format;
    const uint32_t present = rows.present;
    const uint32_t scales =
        Rows::scales_of(smem, turn, Rows::lane() / 8) + (format == FM_KV_FP8_V4 ? Rows::upper() : Rows::piece() / 2);
    const auto convert_half = [&](auto first_quarter) {
      constexpr int kFirst = decltype(first_quarter)::value;
      const int block[2] = {place.block(kFirst), place.block(kFirst + 1)};
      cp_async_wait<1>();
      __syncwarp();
      // The lower half's place is free when that of its last quarter is, the upper one's when the tile's weights are used up, too.
      if (kFirst == 0)
        mbarrier_wait(shared_address(&control.block_empty[block[1]]), place.block_parity(1) ^ 1);
      else
        mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
      rows.template convert<kFirst>(format, scales, group + block_offset(block[0]) + own);
      rows.template convert<kFirst + 1>(format, scales, group + block_offset(block[1]) + own);
      if (kFirst > 0 && Rows::lane() < 2) {  // which rows of each CTA are there
        const uint32_t bits = shared_address(&control.present[place.rope()]);
        const uint32_t rank = cluster_rank() ^ Rows::lane();
        store_shared_bytes<1>(bits + rank * kLoadingWarps + TokenWarps<Map>::warp(), present >> Rows::lane() * kStageRows);
      }
      fence_async_shared();
      __syncwarp();
      send_to_pair(group + block_offset(block[0]), group + block_offset(block[1]), kGroupBytes,
                   shared_address(&control.block_full[block[1]]), cluster_rank() ^ 1);
    };
    convert_half(std::integral_constant<int, 0>());
    begin_next();
    going = !cursor.done();
    cursor.advance(p);
    convert_half(std::integral_constant<int, 2>());
    rows.template ask_for_half<2>(next_format);
    place.advance();
  }
  cp_async_wait<0>();
}

}  // namespace fm
