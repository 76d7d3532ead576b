// The token loader: warps fetch single rows and place the swizzle by hand. For any page size, for caches of single
// tokens by index (sparse attention), for any 16-byte aligned strides, and for quantised caches.
//
// Half of the warps take the even tiles, half the odd ones. Where a page or an index points is looked up one of a warp's
// tiles ahead, over the ends of items. Rows of 16-bit numbers are copied in 16-byte pieces by cp.async, whose arrivals
// nobody waits for here. Of quantised rows a lane fetches 16 codes into registers, a batch of rows at a time, and stores
// them as 16-bit numbers; the next batch is under way while a place is waited for.
#pragma once
#include "coded_rows.cuh"
#include "copied_rows.cuh"

namespace fm {

// Waits for the tile's places, and says which of this warp's tokens are there.
template <class Map>
__device__ __forceinline__ void take_places(DecodeControl& control, TilePlace<Map> place, bool here) {
  constexpr int kRows = TokenWarps<Map>::kRows;
  using OfFew = typename std::conditional<kRows == 16, uint16_t, uint8_t>::type;
  using Bits = typename std::conditional<kRows == 32, uint32_t, OfFew>::type;  // of a warp's rows
  mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
  const uint32_t present = __ballot_sync(~0u, here);
  if (TokenWarps<Map>::lane() == 0)
    reinterpret_cast<Bits*>(&control.present[place.rope()])[TokenWarps<Map>::first_row() / kRows] = (Bits)present;
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i)
    mbarrier_wait(shared_address(&control.block_empty[place.block(i)]), place.block_parity(i) ^ 1);
}

// Calls arrive(barrier) for the tile and each of its blocks.
template <class Map, class Arrive>
__device__ __forceinline__ void publish_tile(DecodeControl& control, TilePlace<Map> place, Arrive arrive) {
  arrive(shared_address(&control.tile_full[place.rope()]));
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i) arrive(shared_address(&control.block_full[place.block(i)]));
}

template <int QkDim, class Map>
__device__ __forceinline__ void copy_tile(const FmDecodeParams& p, const TileCursor<Map>& at, uint32_t smem,
                                          DecodeControl& control, TilePlace<Map> place) {
  const TokenPlace token = at.place(p);
  take_places<Map>(control, place, token.page >= 0);
  copy_rows<QkDim, Map>(p.kv[at.cache], load_row_block<Map>(p, at.item).kv_head, token, smem, place);
  publish_tile<Map>(control, place, [](uint32_t barrier) { arrive_when_copied(barrier); });
}

// A warp's way through its tiles of 16-bit numbers.
template <int QkDim, class Map>
__device__ __forceinline__ void copy_tiles(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  TilePlace<Map> place;
  place.count = TokenWarps<Map>::half();
  TileCursor<Map> now, next;
  now.begin(p);
  next = now;
#pragma unroll 1
  while (!now.done()) {
    next.advance(p);
    copy_tile<QkDim, Map>(p, now, smem, control, place);
    now = next;
    place.advance(), place.advance();
  }
}

// Where a tile's rows are, if they are codes; of 16-bit rows which cache they are in only.
template <int QkDim, class Map>
__device__ __forceinline__ CodedRows coded_rows(const FmDecodeParams& p, const TileCursor<Map>& at) {
  const FmKvCache& kv = p.kv[at.cache];
  CodedRows rows = {0, 0, 0, at.cache};
  const TokenPlace token = at.place(p);
  const bool present = !at.done() && kv.format > FM_KV_FP16 && token.page >= 0;
  if (present) {
    rows.row = (token.page * kv.row_stride[0] + token.offset * kv.row_stride[1]) / 16;
    if (QkDim == kLatent) rows.scales = scales_after(kv, token.offset);
  }
  rows.present = __ballot_sync(~0u, present);
  return rows;
}

// A warp's way through its tiles where they may be of codes. The next batch of rows is asked for as soon as the
// registers of the last one are free, and is under way while places are waited for.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void convert_tiles(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  using Batch = RowBatch<T, QkDim, Map>;
  TilePlace<Map> place;
  place.count = TokenWarps<Map>::half();
  TileCursor<Map> now, next;
  now.begin(p);
  next = now;
  next.advance(p);
  CodedRows rows = coded_rows<QkDim, Map>(p, now);
  Batch batch;
  batch.load(p, rows, 0);
#pragma unroll 1
  while (!now.done()) {
    if (p.kv[rows.cache].format <= FM_KV_FP16) {
      copy_tile<QkDim, Map>(p, now, smem, control, place);
      rows = coded_rows<QkDim, Map>(p, next);
      batch.load(p, rows, 0);
    } else {
      take_places<Map>(control, place, rows.own_present());
      copy_plain_columns<T, QkDim, Map>(p, rows, smem, place);
#pragma unroll 1
      for (int first = 0; first < TokenWarps<Map>::kRows; first += Batch::kRows) {
        batch.store(p, rows, first, smem, place);
        const bool last = first + Batch::kRows == TokenWarps<Map>::kRows;
        if (last) rows = coded_rows<QkDim, Map>(p, next);
        batch.load(p, rows, last ? 0 : first + Batch::kRows);
      }
      cp_async_wait<0>();
      fence_async_shared();
      publish_tile<Map>(control, place, [](uint32_t barrier) { arrive_for_warp<32>(barrier); });
    }
    now = next;
    next.advance(p);
    place.advance(), place.advance();
  }
}

template <class T, int QkDim, class Map, bool Quantised>
__device__ __forceinline__ void load_tiles_tokens(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  if constexpr (Quantised)
    convert_tiles<T, QkDim, Map>(p, smem, control);
  else
    copy_tiles<QkDim, Map>(p, smem, control);
}

}  // namespace fm
