// The loader of raw rows. Two or four warps ask for rows, 32 or 16 of each tile: for boxes of whole pages by tensor map where there is one,
// else for each row by a bulk copy. Others prepare what has come (raw_preparation.cuh), but of bare rows: a tile of those is full when it has
// come, and who masks scores sees to rows that are absent (raw_scores.cuh).
//
// fp8 and fp8_v32 (576 columns); fp8, fp8_v4, fp8_v41 and fp8_v41_split (512); fp4_v41 beside these but fp8_v4 (RawMap::kFine). Bare rows
// are of fp8 alone.
#pragma once
#include <cuda.h>
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "coded_rows.cuh"
#include "raw_e2m1.cuh"
#include "raw_map.cuh"
#include "raw_preparation.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"
#include "work.cuh"

namespace fm {

// By one thread. Not of bare rows.
template <class Map, class Control>
__device__ __forceinline__ void init_raw_barriers(Control& control) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int h = 0; h < Map::kPreparingWarps; ++h)
      mbarrier_init(shared_address(&control.landed[i][h]), Map::kAskingWarps / Map::kPreparingWarps * (1 + 32));
}

template <uint32_t N>
using Bytes = std::integral_constant<uint32_t, N>;

// Calls f with the bytes of a row that one copy brings, a constant, for which copies take fewer instructions.
template <class Map, class F>
__device__ __forceinline__ void with_raw_bytes(int format, F f) {
  if constexpr (Map::kBare)
    f(Bytes<Map::kKeyGroups * 32>());
  else if (Map::kHasRope && format != FM_KV_FP8)
    f(Bytes<656>());
  else if (Map::kHasRope || (Map::kMayBePlain && format == FM_KV_FP8_V4))
    f(Bytes<576>());
  else if (Map::kFine && format == FM_KV_FP4_V41)
    f(Bytes<kE2m1RowBytes>());
  else if (format == FM_KV_FP8_V41)
    f(Bytes<528>());
  else
    f(Bytes<512>());
}

// Scales that lie apart from their row, to the row.
template <class Map>
__device__ __forceinline__ void ask_for_scales(int format, uint32_t to, const uint8_t* scales) {
  if (format == FM_KV_FP8_V4)
    cp_async_8(to + Map::kScalesAfterPlain, scales);
  else if (format == FM_KV_FP8_V41_SPLIT)
    cp_async_16(to + Map::kScales, scales);
}

__device__ __forceinline__ const uint8_t* row_at(const FmKvCache& kv, TokenPlace token) {
  return reinterpret_cast<const uint8_t*>(kv.rows) + token.page * kv.row_stride[0] + token.offset * kv.row_stride[1];
}

// Bulk copies of each lane's row, to places `step` apart.
template <int Rows, uint32_t RowBytes>
__device__ __forceinline__ void ask_for_all_rows(uint32_t to, uint32_t step, const uint8_t* from, uint32_t barrier) {
#pragma unroll 1
  for (int row = 0; row < Rows; row += 4) {
    uint64_t four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = __shfl_sync(~0u, reinterpret_cast<uint64_t>(from), row + i);
    bulk_load_four<RowBytes>(to + row * step, step, four, barrier);
  }
}

// Tensor maps, where there are any: of rows, or of their first 512 columns, and of what follows these (RowLayout).
struct RowMaps {
  const CUtensorMap *rows, *tails;
};

// By an asking warp: tile after tile. Where whole boxes of a page can be had, by tensor map, they are; else single rows. The two
// CTAs of a cluster ask for half of them each: a warp of each for its boxes, half of each warp's lanes for rows.
template <int QkDim, class Map, class Control>
__device__ __forceinline__ void ask_for_rows(const FmDecodeParams& p, const RowMaps& maps, const FirstItem& first_item,
                                             uint32_t smem, Control& control) {
  using Warps = TokenWarps<Map>;
  constexpr int kRows = Warps::kRows;
  constexpr uint32_t kAll = ~0u >> (32 - kRows);
  const int warp = Warps::warp(), lane = Warps::lane();
  const bool shared = !Map::kFewRows && p.multicast > 1;
  constexpr uint16_t kBoth = 3;
  const auto policy = [&] { return opaque(p.reads_once) ? kEvictFirst : kEvictNormal; };  // of boxes; registers are short
  RawPlace<Map> place;
  TileCursor<Map> cursor;
  cursor.begin(p, first_item);
  cursor.prefetch_entries(p);
  wait_for_earlier_launches();
  cursor.start(p);
#pragma unroll 1
  while (!cursor.done()) {
    const FmKvCache& kv = p.kv[cursor.cache];
    TokenPlace token = cursor.place(p);
    if (kRows < 32 && lane >= kRows) token.page = -1;  // another lane's
    cursor.advance(p);
    const int at = place.at(), format = kv.format;
    // Copies whose operands the compiler does not see to be uniform have turns, a lane after another.
    const uint32_t barrier = uniform(shared_address(
        Map::kBare ? &control.tile_full[at] : &control.landed[at][warp * Map::kPreparingWarps / Map::kAskingWarps]));
    const uint32_t to = Map::row(smem, at, kRows * warp + lane);
    const uint32_t present = __ballot_sync(~0u, token.page >= 0);
    const uint8_t* from = nullptr;
    if constexpr (Map::kFewRows) {  // found while the place is waited for
      from = row_at(kv, token);
      asm volatile("" : "+l"(from));
    }
    mbarrier_wait(shared_address(&control.tile_empty[at]), place.parity() ^ 1);
    if (lane == 0) {
      store_present<kRows>(control.present[at], warp, present);
      control.format[at] = format;
    }
    if (Map::kBoxes && p.box_shift >= 0) {
      static_assert(FM_RAW_BOX_ROWS <= 32, "boxes of half of a tile");
      static_assert(!Map::kBoxes || Map::kPreparingWarps <= kTileTokens / FM_RAW_BOX_ROWS, "a box is prepared by one warp");
      const int rows = 1 << p.box_shift;
      const bool first = (kRows * warp + lane) % rows == 0 && token.page >= 0;
      const int boxes = __popc(__ballot_sync(~0u, first));
      if (lane == 0) mbarrier_arrive_expect(barrier, boxes * rows * (Map::kSwizzled ? QkDim : Map::kRowBytes));
      __syncwarp();
      if constexpr (Map::kSwizzled) {
        const RowLayout<Map> layout = {p.box_shift};
        const uint32_t tile = Map::row(smem, at, 0);
        if (first) {
          tma_load_4d(tile + layout.row(kRows * warp + lane), maps.rows, barrier, 0, token.offset, 0, token.page, policy());
          if (Map::kHasRope)
            tma_load_3d(tile + layout.tail(kRows * warp + lane), maps.tails, barrier, 0, token.offset, token.page, policy());
        }
      } else if (!shared) {
        if (first) tma_load_3d(to, maps.rows, barrier, 0, token.offset, token.page, policy());
      } else if (kRows * warp / (kTileTokens / 2) == (int)cluster_rank()) {
        if (first) tma_multicast_3d(to, maps.rows, barrier, kBoth, 0, token.offset, token.page, policy());
      }
    } else {
      uint32_t bytes = 0;
      with_raw_bytes<Map>(format, [&](auto of_row) { bytes = decltype(of_row)::value; });
      bytes = uniform(bytes);
      if (lane == 0) mbarrier_arrive_expect(barrier, __popc(present) * bytes);
      __syncwarp();
      if (!Map::kHasRope && !Map::kBare) {
        if (token.page >= 0) ask_for_scales<Map>(format, to, (Map::kFewRows ? from : row_at(kv, token)) + scales_after(kv, token.offset));
        if (!Map::kFewRows) asm volatile("" : "+r"(token.page), "+r"(token.offset));  // the row is found anew: registers
      }
      const bool together = Map::kFewRows && present == kAll;
      if (together)
        with_raw_bytes<Map>(format, [&](auto of_row) {
          ask_for_all_rows<kRows, decltype(of_row)::value>(uniform(to), Map::kRowBytes, from, barrier);
        });
      if (token.page >= 0) {
        if (!Map::kFewRows) from = row_at(kv, token);
        if (!shared && !together)
          bulk_load(to, from, bytes, barrier);
        else if (shared && lane / (kRows / 2) == (int)cluster_rank())
          bulk_multicast(to, from, bytes, barrier, kBoth);
      }
    }
    if constexpr (!Map::kBare) arrive_when_copied(barrier);  // with scales that lie apart
    place.advance();
  }
  if (shared)  // no CTA leaves while another may still arrive here, or what it has asked for is on its way there
#pragma unroll 1
    for (int i = 0; i < Map::kPlaces; ++i, place.advance()) mbarrier_wait(shared_address(&control.tile_empty[place.at()]), place.parity() ^ 1);
}

template <class T, int QkDim, class Map, class Control>
__device__ __forceinline__ void load_raw_tiles(const FmDecodeParams& p, const RowMaps& maps, const FirstItem& first,
                                               uint32_t smem, Control& control) {
  const unsigned thread = block_thread();
  const bool asks = thread < 32 * Map::kAskingWarps;
  if (Map::kLoaders == 2 && Map::kPreparingWarps < 4 && thread >= FM_DECODE_THREADS - 128 + 32 * Map::kPreparingWarps) {
    wait_for_earlier_launches();  // every thread does
    return;
  }
  const auto ask = [&] { ask_for_rows<QkDim, Map>(p, maps, first, smem, control); };
  const auto prepare = [&] {
    if constexpr (Map::kBare)
      wait_for_earlier_launches();  // every thread does
    else
      prepare_rows<T, Map>(p, first, smem, control);
  };
  // What comes first lies first in the instruction cache, which is worth 1 to 3 %, either way (docs/tried-sparse.md, "Instructions").
  if constexpr (Map::kFewRows) {
    if (!asks)
      prepare();
    else
      ask();
  } else {
    if (asks)
      ask();
    else
      prepare();
  }
}

}  // namespace fm
