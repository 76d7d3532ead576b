// The token loader of 16-bit numbers: each of four warps copies 16 tokens of a tile, a column quarter after another, as soon as the
// quarter's place is free: the first quarters of a tile while the one before is on its way.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/copy.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/mbarrier.cuh"
#include "copied_rows.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"
#include "work.cuh"

namespace fm {

// What a lane copies of its warp's 16 tokens: of each column quarter 16 bytes of every other token.
template <class Map>
struct QuarterPieces {
  static constexpr int kTokens = 8;
  const uint8_t* from[kTokens];  // in the first quarter
  uint32_t present;              // bit 2 i: token i is there
  uint32_t to;                   // in a block; that of token i is 256 i on, with the swizzle of its row

  // `row`: of token lane % 16; `all`: which are present, a bit each.
  __device__ __forceinline__ QuarterPieces(const uint8_t* row, uint32_t all, const void* any) {
    const int lane = TokenWarps<Map>::lane(), first = lane / 16, piece = lane % 16;
    const uint8_t* own = row == nullptr ? reinterpret_cast<const uint8_t*>(any) : row;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) from[i] = shuffle(own, first + 2 * i) + piece * 16;
    present = all >> first;
    to = TokenWarps<Map>::warp() * 2 * kGroupBytes + latent_swizzled(first, piece);
  }
  template <bool All>
  __device__ __forceinline__ void copy(int quarter, uint32_t block) const {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const uint32_t there = block + (to ^ i % 4 * 32) + (i / 4 * kGroupBytes + i % 4 * 256);
      const uint8_t* piece = from[i] + quarter * (2 * kBlockWidth);
      if (All)
        cp_async_16(there, piece);
      else
        cp_async_16(there, piece, present >> 2 * i & 1);
    }
  }
};

template <int QkDim, class Map>
__device__ __forceinline__ void load_quarters(const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                              DecodeControl& control) {
  static_assert(TokenWarps<Map>::kRows == 16);
  constexpr bool kEarly = Map::kRows < kTileRows;  // with 64 rows few requests take 2 % longer then
  TilePlace<Map> place;
  TileCursor<Map> cursor;  // a tile ahead
  if (!kEarly) wait_for_earlier_launches();
  cursor.begin(p, first);
  if (kEarly) {
    cursor.prefetch_entries(p);
    wait_for_earlier_launches();
  }
  cursor.start(p);
#pragma unroll 1
  while (!cursor.done()) {
    const TokenPlace token = cursor.place(p);
    const uint32_t present = __ballot_sync(~0u, token.page >= 0);
    const auto own = [&](auto part, auto stride) {
      return in_cache<Map>(p, cursor.cache, [&](const FmKvCache& kv) { return row_of(kv.*part, kv.*stride, token, cursor.kv_head); });
    };
    const QuarterPieces<Map> pieces(own(&FmKvCache::rows, &FmKvCache::row_stride), present, p.kv[0].rows);
    const uint8_t* rope = QkDim > kLatent ? own(&FmKvCache::rope, &FmKvCache::rope_stride) : nullptr;
    cursor.advance(p);
#pragma unroll
    for (int quarter = 0; quarter < kTileBlocks; ++quarter) {
      const int block = place.block(quarter);
      mbarrier_wait(shared_address(&control.block_empty[block]), place.block_parity(quarter) ^ 1);
      if (present == ~0u)
        pieces.template copy<true>(quarter, smem + block_offset(block));
      else
        pieces.template copy<false>(quarter, smem + block_offset(block));
      if (Map::tells(quarter)) arrive_when_copied(shared_address(&control.block_full[block]));
    }
    mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
    leave_present<Map>(control, place, present);
    if constexpr (QkDim > kLatent) copy_rope_parts<Map>(rope, p.kv[0].rows, smem + Map::rope_offset(place.rope()));
    arrive_when_copied(shared_address(&control.tile_full[place.rope()]));
    place.advance();
  }
}

}  // namespace fm
