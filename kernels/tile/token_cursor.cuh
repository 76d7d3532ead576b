// The tiles that a loading warp fetches token by token: which warp has which rows, and where the tokens are.
#pragma once
#include "../ptx/control.cuh"
#include "work.cuh"

namespace fm {

template <class Map>
struct TokenWarps {
  // Warps in all: as many as registers allow, up to where more were no faster.
  static constexpr int kWarps = Map::kRows == kTileRows ? 4 : Map::kRows == 16 && !Map::kCodes ? 16 : 8;
  // Tiles that are fetched at a time. Copies wait for nothing but their places; conversions hold one tile's for less time.
  static constexpr int kTurns = Map::kCodes ? 1 : 2;
  static constexpr int kOfTile = kWarps / kTurns;
  static constexpr int kArrivals = kOfTile * 32;       // for a block: one of each lane
  static constexpr int kRows = kTileTokens / kOfTile;  // of a warp; a lane knows one
  static_assert(kRows <= 32);


  static __device__ __forceinline__ int thread() { return block_thread() - (FM_DECODE_THREADS - 128); }
  static __device__ __forceinline__ int lane() { return block_thread() % 32; }
  static __device__ __forceinline__ int turn() { return thread() / (kOfTile * 32); }
  static __device__ __forceinline__ int row() { return first_row() + lane() % kRows; }  // this lane's
  static __device__ __forceinline__ int first_row() { return thread() / 32 % kOfTile * kRows; }
};

// Where a token is: its page (-1 when absent) and its offset in it.
struct TokenPlace {
  int page, offset;
};

// The tokens of a tile: which cache they are in, and which positions there. Tiles of a row's extra cache follow those
// of its main cache.
struct TilePositions {
  int cache, first, end;

  __device__ __forceinline__ TilePositions(const FmDecodeParams& p, const RowBlock& r, int tile) {
    const int position = tile * kTileTokens;
    const bool sparse = p.kv[0].indices != nullptr;
    cache = 0, first = position, end = sparse ? r.main_len : r.seq_len;
    if (sparse && position >= r.main_len) {
      const int before = (r.main_len + kTileTokens - 1) / kTileTokens * kTileTokens;
      cache = 1, first = position - before, end = r.seq_len - before;
    }
  }
};

// The tiles of a warp, one after another through the items of the worker, and what was looked up for this lane's token.
template <class Map>
struct TileCursor {
  static constexpr int kDone = 0x7FFFFFFF;
  int item;       // kDone after the last tile
  int tile, end;  // of the item's tiles
  int cache;      // which one the tile is in
  int found;      // what the block table or the list of indices says; -1 where there is nothing

  __device__ __forceinline__ bool done() const { return item == kDone; }

  // To the warp's first tile.
  __device__ __forceinline__ void begin(const FmDecodeParams& p) {
    item = first_worker_item<Map>(p) - 1;
    tile = TokenWarps<Map>::turn();
    enter_next(p);
  }
  // To its next tile.
  __device__ __forceinline__ void advance(const FmDecodeParams& p) {
    if (done()) return;
    tile += TokenWarps<Map>::kTurns;
    if (tile < end) {
      look_up(p, load_row_block<Map>(p, item));
      return;
    }
    tile -= end;
    enter_next(p);
  }
  // To tile `tile` of what follows this item.
  __device__ __forceinline__ void enter_next(const FmDecodeParams& p) {
    const int last = next_worker_item<Map>(p);
    found = -1, cache = 0;
    while (++item < last) {
      const RowBlock r = load_row_block<Map>(p, item);
      if (!Map::kSplits && r.row_begin >= r.rows && p.multicast == 1) continue;
      const int tiles = max(r.tile_end - r.tile_begin, 0);
      if (tile >= tiles) {
        tile -= tiles;
        continue;
      }
      tile += r.tile_begin, end = r.tile_end;
      look_up(p, r);
      return;
    }
    item = kDone;
  }
  __device__ __forceinline__ void look_up(const FmDecodeParams& p, const RowBlock& r) {
    const TilePositions tokens(p, r, tile);
    const FmKvCache& kv = p.kv[tokens.cache];
    const int position = tokens.first + TokenWarps<Map>::row();
    cache = tokens.cache, found = -1;
    if (position >= tokens.end) return;
    if (kv.indices != nullptr) {
      found = load_once(kv.indices + r.request * kv.indices_stride[0] + r.q_begin * kv.indices_stride[1] + position);
    } else {
      const int column = kv.page_shift >= 0 ? position >> kv.page_shift : position / kv.page_size;
      if (column < p.max_pages) found = load_once(p.block_table + r.request * p.block_table_stride + column);
    }
  }
  // Where the token is.
  __device__ __forceinline__ TokenPlace place(const FmDecodeParams& p) const {
    const FmKvCache& kv = p.kv[cache];
    if (found < 0) return {-1, 0};
    const bool sparse = kv.indices != nullptr;
    const int of = sparse ? found : tile * kTileTokens + TokenWarps<Map>::row();
    int page = found, offset;
    if (kv.page_shift >= 0) {
      if (sparse) page = found >> kv.page_shift;
      offset = of & (kv.page_size - 1);
    } else {
      if (sparse) page = found / kv.page_size;
      offset = of % kv.page_size;
    }
    return {page < kv.num_pages ? page : -1, offset};
  }
};

}  // namespace fm
