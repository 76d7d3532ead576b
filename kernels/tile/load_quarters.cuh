// The token loader of 64 query rows, 16-bit numbers: each of four warps copies 16 tokens of a tile, a column quarter after
// another, as soon as the quarter's place is free: the first quarters of a tile while the one before is on its way.
#pragma once
#include "copied_rows.cuh"

namespace fm {

// A warp's rows of a tile: that of token lane % 16 of its own. Where it is absent, whatever.
struct OwnRow {
  const uint8_t* row;
  uint32_t present;  // a bit for each lane
};

// This warp's part of a block, from the rows' pieces at `row`: two tokens at a time, 16 lanes to each.
template <bool All, class Map>
__device__ __forceinline__ void copy_block(OwnRow own, const void* any, uint32_t block) {
  const int lane = TokenWarps<Map>::lane(), first = lane / 16, piece = lane % 16;
  const uint32_t to = block + TokenWarps<Map>::warp() * 2 * kGroupBytes;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint8_t* from = shuffle(own.row, first + 2 * i) + piece * 16;
    const uint32_t there = to + latent_swizzled(first + i % 4 * 2, piece) + i / 4 * kGroupBytes;
    if (All)
      cp_async_16(there, from);
    else
      copy_piece(there, own.present >> (first + 2 * i) & 1 ? from : nullptr, 0, any);
  }
}

template <int QkDim, class Map>
__device__ __forceinline__ void load_quarters(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  static_assert(TokenWarps<Map>::kRows == 16);
  const auto lane = [] { return TokenWarps<Map>::lane(); };  // read anew each time: registers are short
  TilePlace<Map> place;
  TileCursor<Map> cursor;  // a tile ahead
  cursor.begin(p);
#pragma unroll 1
  while (!cursor.done()) {
    const FmKvCache& kv = p.kv[cursor.cache];
    const TokenPlace token = cursor.place(p);
    OwnRow own = {row_of(kv.rows, kv.row_stride, token, cursor.kv_head), __ballot_sync(~0u, token.page >= 0)};
    const uint8_t* rope = QkDim > kLatent ? row_of(kv.rope, kv.rope_stride, token, cursor.kv_head) : nullptr;
    cursor.advance(p);
#pragma unroll 1
    for (int quarter = 0; quarter < kTileBlocks; ++quarter) {
      const int block = place.block(quarter);
      mbarrier_wait(shared_address(&control.block_empty[block]), place.block_parity(quarter) ^ 1);
      if (own.present == ~0u)
        copy_block<true, Map>(own, p.kv[0].rows, smem + block_offset(block));
      else
        copy_block<false, Map>(own, p.kv[0].rows, smem + block_offset(block));
      arrive_when_copied(shared_address(&control.block_full[block]));
      own.row += 2 * kBlockWidth;
    }
    mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
    leave_present<Map>(control, place, own.present);
    if constexpr (QkDim > kLatent) {
      const uint32_t to = smem + Map::rope_offset(place.rope()) + TokenWarps<Map>::warp() * 2 * kAtomBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_piece(to + swizzled(4 * i + lane() / 8, lane() % 8), shuffle(rope, 4 * i + lane() / 8), lane() % 8 * 16,
                   p.kv[0].rows);
    }
    arrive_when_copied(shared_address(&control.tile_full[place.rope()]));
    place.advance();
  }
}

}  // namespace fm
