// The loader of raw rows. Of its four warps two ask for rows, 32 of each tile: for boxes of whole pages by tensor map where
// there is one, else for each row by a bulk copy. Two prepare what has come (raw_preparation.cuh), but of bare rows: a tile of those is full
// when it has come, and who masks scores sees to rows that are absent (raw_scores.cuh).
//
// fp8 and fp8_v32 (576 columns); fp8, fp8_v4, fp8_v41 and fp8_v41_split (512); fp4_v41 beside these but fp8_v4 (RawMap::kFine). Bare rows
// are of fp8 alone.
#pragma once
#include <cuda.h>
#include <stdint.h>

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

constexpr int kAskingWarps = 2, kPreparingWarps = 2;

// By one thread. Not of bare rows.
template <class Control>
__device__ __forceinline__ void init_raw_barriers(Control& control) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) mbarrier_init(shared_address(&control.landed[i][h]), 1 + 32);
}

// Bytes of a row that one copy brings.
template <class Map>
__device__ __forceinline__ uint32_t raw_bytes(int format) {
  if (Map::kHasRope) return format == FM_KV_FP8 ? 576 : 656;
  if (Map::kFine && format == FM_KV_FP4_V41) return kE2m1RowBytes;
  return format == FM_KV_FP8_V4 ? 576 : format == FM_KV_FP8_V41 ? 528 : 512;
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
__device__ __forceinline__ void ask_for_32_rows(uint32_t to, uint32_t step, const uint8_t* from, uint32_t bytes,
                                                uint32_t barrier) {
#pragma unroll 1
  for (int row = 0; row < 32; row += 4) {
    uint64_t four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = __shfl_sync(~0u, reinterpret_cast<uint64_t>(from), row + i);
    bulk_load_four(to + row * step, step, four, bytes, barrier);
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
  const int warp = TokenWarps<Map>::warp(), lane = TokenWarps<Map>::lane();
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
    cursor.advance(p);
    const int at = place.at(), format = kv.format;
    // Copies whose operands the compiler does not see to be uniform have turns, a lane after another.
    const uint32_t barrier = uniform(shared_address(Map::kBare ? &control.tile_full[at] : &control.landed[at][warp]));
    const uint32_t to = Map::row(smem, at, 32 * warp + lane);
    const uint32_t present = __ballot_sync(~0u, token.page >= 0);
    const uint8_t* from = nullptr;
    if constexpr (Map::kFewRows) {  // found while the place is waited for
      from = row_at(kv, token);
      asm volatile("" : "+l"(from));
    }
    mbarrier_wait(shared_address(&control.tile_empty[at]), place.parity() ^ 1);
    if (lane == 0) {
      reinterpret_cast<uint32_t*>(&control.present[at])[warp] = present;
      control.format[at] = format;
    }
    if (p.box_shift >= 0) {
      static_assert(FM_RAW_BOX_ROWS <= 32, "boxes of a warp's rows");
      const int rows = 1 << p.box_shift;
      const bool first = lane % rows == 0 && token.page >= 0;
      const int boxes = __popc(__ballot_sync(~0u, first));
      if (lane == 0) mbarrier_arrive_expect(barrier, boxes * rows * (Map::kSwizzled ? QkDim : Map::kRowBytes));
      __syncwarp();
      if constexpr (Map::kSwizzled) {
        const RowLayout<Map> layout = {p.box_shift};
        const uint32_t tile = Map::row(smem, at, 0);
        if (first) {
          tma_load_4d(tile + layout.row(32 * warp + lane), maps.rows, barrier, 0, token.offset, 0, token.page, policy());
          if (Map::kHasRope)
            tma_load_3d(tile + layout.tail(32 * warp + lane), maps.tails, barrier, 0, token.offset, token.page, policy());
        }
      } else if (!shared) {
        if (first) tma_load_3d(to, maps.rows, barrier, 0, token.offset, token.page, policy());
      } else if (warp == (int)cluster_rank()) {
        if (first) tma_multicast_3d(to, maps.rows, barrier, kBoth, 0, token.offset, token.page, policy());
      }
    } else {
      const uint32_t bytes = uniform(raw_bytes<Map>(Map::kBare ? FM_KV_FP8 : format));
      if (lane == 0) mbarrier_arrive_expect(barrier, __popc(present) * bytes);
      __syncwarp();
      if (!Map::kHasRope && !Map::kBare) {
        if (token.page >= 0) ask_for_scales<Map>(format, to, (Map::kFewRows ? from : row_at(kv, token)) + scales_after(kv, token.offset));
        if (!Map::kFewRows) asm volatile("" : "+r"(token.page), "+r"(token.offset));  // the row is found anew: registers
      }
      const bool together = Map::kFewRows && present == ~0u;
      if (together) ask_for_32_rows(uniform(to), Map::kRowBytes, from, bytes, barrier);
      if (token.page >= 0) {
        if (!Map::kFewRows) from = row_at(kv, token);
        if (!shared && !together)
          bulk_load(to, from, bytes, barrier);
        else if (shared && lane / 16 == (int)cluster_rank())
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
  const bool asks = TokenWarps<Map>::thread() < 64;
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
