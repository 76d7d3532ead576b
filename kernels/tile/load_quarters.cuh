// The token loader of 64 query rows, 16-bit numbers: four warps copy 16 tokens of each tile, a column quarter after another
// in the order in which places get free. The first two quarters and the rope part have three places, the others two: of a
// tile these come when the last but one is used up, and behind them the first quarters of the tile after it.
#pragma once
#include "copied_rows.cuh"

namespace fm {

template <class T, int QkDim, class Map>
struct QuarterLoader {
  using Warps = TokenWarps<Map>;
  static_assert(Map::kTriple == 2 && Warps::kRows == 16);
  DecodeControl& control;
  uint32_t smem;
  TilePlace<Map> place;
  const uint8_t* own;  // the row of token lane % 16 of this warp's; whatever where it is absent
  uint32_t present;    // of these
  int item = -1;       // whose Q has been asked for

  // This warp's part of the block of quarter `quarter`: two tokens at a time, 16 lanes to each.
  template <bool All>
  __device__ __forceinline__ void copy_block(int quarter, const void* any, uint32_t block) const {
    const int lane = Warps::lane(), first = lane / 16, piece = lane % 16;
    const uint32_t to = block + Warps::warp() * 2 * kGroupBytes, here = present >> first;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint8_t* from = shuffle(own, first + 2 * i) + quarter * (2 * kBlockWidth) + piece * 16;
      const uint32_t there = to + latent_swizzled(first + i % 4 * 2, piece) + i / 4 * kGroupBytes;
      if (All)
        cp_async_16(there, from);
      else
        copy_piece(there, here >> 2 * i & 1 ? from : nullptr, 0, any);
    }
  }
  __device__ __forceinline__ void load_block(int quarter, const void* any) const {
    const int block = place.block(quarter);
    mbarrier_wait(shared_address(&control.block_empty[block]), place.block_parity(quarter) ^ 1);
    if ((present & 0xFFFF) == 0xFFFF)
      copy_block<true>(quarter, any, smem + block_offset(block));
    else
      copy_block<false>(quarter, any, smem + block_offset(block));
    arrive_when_copied(shared_address(&control.block_full[block]));
  }
  // The rope part, and which tokens there are.
  __device__ __forceinline__ void load_rest(const uint8_t* rope, const void* any) const {
    const int lane = Warps::lane(), tile = place.rope();
    mbarrier_wait(shared_address(&control.tile_empty[tile]), place.rope_parity() ^ 1);
    leave_present<Map>(control, place, present);
    if constexpr (QkDim > kLatent) {
      const uint32_t to = smem + Map::rope_offset(tile) + Warps::warp() * 2 * kAtomBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_piece(to + swizzled(4 * i + lane / 8, lane % 8), shuffle(rope, 4 * i + lane / 8), lane % 8 * 16, any);
    }
    arrive_when_copied(shared_address(&control.tile_full[tile]));
  }
  // The first quarters of the cursor's tile, which becomes the one at work.
  __device__ __forceinline__ void begin_tile(const FmDecodeParams& p, TileCursor<Map>& cursor) {
    const FmKvCache& kv = p.kv[cursor.cache];
    const TokenPlace token = cursor.place(p);
    own = row_of(kv.rows, kv.row_stride, token, cursor.kv_head);
    const uint8_t* rope = QkDim > kLatent ? row_of(kv.rope, kv.rope_stride, token, cursor.kv_head) : nullptr;
    present = __ballot_sync(~0u, token.page >= 0);
    if (cursor.item != item) {
      item = cursor.item;
      prefetch_query<T, QkDim, Map>(p, item);
    }
    cursor.advance(p);
    load_block(0, p.kv[0].rows);
    load_block(1, p.kv[0].rows);
    load_rest(rope, p.kv[0].rows);
  }
};

template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_quarters(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  QuarterLoader<T, QkDim, Map> loader = {control, smem};
  TileCursor<Map> cursor;  // a tile ahead
  cursor.begin(p);
  if (cursor.done()) return;
  loader.begin_tile(p, cursor);
#pragma unroll 1
  while (true) {
    loader.load_block(2, p.kv[0].rows);
    loader.load_block(3, p.kv[0].rows);
    if (cursor.done()) return;
    loader.place.advance();
    loader.begin_tile(p, cursor);
  }
}

}  // namespace fm
