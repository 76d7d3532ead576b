// The tiles that a loading warp fetches token by token: which warp has which rows, and where the tokens are.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/global.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

template <class Map>
struct TokenWarps {
  // To convert codes as many as registers allow.
  static constexpr int kWarps = [] {
    if constexpr (Map::kRaw) return Map::kAskingWarps;
    return Map::kCodes && Map::kRows < kTileRows ? 8 : 4;
  }();
  static constexpr int kArrivals = kWarps * 32;       // at a barrier: one of each lane
  static constexpr int kRows = kTileTokens / kWarps;  // of a warp; a lane knows one
  static_assert(kRows <= 32);

  // Unsigned: divisions by powers of two are one instruction.
  static __device__ __forceinline__ unsigned thread() { return block_thread() - (Map::kRaw ? 0 : FM_DECODE_THREADS - 128); }
  static __device__ __forceinline__ int lane() { return (unsigned)block_thread() % 32; }
  static __device__ __forceinline__ int warp() { return thread() / 32 % kWarps; }
  static __device__ __forceinline__ int first_row() { return warp() * kRows; }
  // This lane's. Of pairs of CTAs that load for each other eight of sixteen are the other one's: that they are there is looked up.
  static __device__ __forceinline__ int row() {
    if (Map::kShare == 2)
      return (cluster_rank() ^ (unsigned)block_thread() / 8 & 1) * (kTileTokens / 2) + warp() * (kRows / 2) + block_thread() % 8;
    return first_row() + (unsigned)block_thread() % kRows;
  }
};

// Which rows of a warp's, number `warp` of those that share a tile, are there: a bit each of the tile's.
template <int Rows>
using PresentBits = std::conditional_t<Rows == 32, uint32_t, std::conditional_t<Rows == 16, uint16_t, uint8_t>>;
template <int Rows>
__device__ __forceinline__ void store_present(uint64_t& tile, int warp, uint32_t present) {
  static_assert(Rows == 32 || Rows == 16 || Rows == 8);
  reinterpret_cast<PresentBits<Rows>*>(&tile)[warp] = (PresentBits<Rows>)present;
}
template <int Rows>
__device__ __forceinline__ uint32_t load_present(const uint64_t& tile, int warp) {
  return reinterpret_cast<const PresentBits<Rows>*>(&tile)[warp];
}

// Where a token is: its page (-1 when absent) and its offset in it.
struct TokenPlace {
  int page, offset;
};

// Calls f with one of the caches: with each on a way of its own, where parameters are operands instead of loads, unless
// registers are short.
template <class Map, class F>
__device__ __forceinline__ auto in_cache(const FmDecodeParams& p, int cache, F f) {
  if (Map::kRaw || Map::kShare > 0) return f(p.kv[cache]);
  if (cache == 0) return f(p.kv[0]);
  return f(p.kv[1]);
}

// The tiles of a worker, one after another through its items, and what was looked up for this lane's token.
// Tiles of a sparse row's extra cache follow those of its main cache, from a whole tile on.
template <class Map>
struct TileCursor {
  static constexpr int kDone = 0x7FFFFFFF;
  int item;            // kDone after the last tile
  int left;            // tiles of the item from this one on
  int cache;           // which one the tile is in
  int position;        // the tile's first token there
  int tokens;          // how many the row has there
  const int* entries;  // of its tokens: indices, or pages of the block table
  int kv_head;
  int found;           // what is there for this lane's token; -1: nothing
  int paired_row;      // of pairs: this lane's row, which takes long to find

  __device__ __forceinline__ int row() const { return Map::kShare == 2 ? paired_row : TokenWarps<Map>::row(); }

  __device__ __forceinline__ bool done() const { return item == kDone; }

  // To the first item's first tile, if it has one. Only the plan is read: earlier launches may be running.
  __device__ __forceinline__ void begin(const FmDecodeParams& p, const FirstItem& first) {
    item = kDone, cache = 0, found = -1;
    if (Map::kShare == 2) paired_row = TokenWarps<Map>::row();
    if (!first.exists()) return;
    item = first.number;
    const RowBlock r = load_row_block<Map, true>(p, item);
    if (has_tiles(p, r)) enter(p, r);
  }
  __device__ __forceinline__ void start(const FmDecodeParams& p) {
    if (done()) return;
    if (left == 0)
      enter_next(p);
    else
      look_up(p);
  }
  // To its next tile.
  __device__ __forceinline__ void advance(const FmDecodeParams& p) {
    if (done()) return;
    position += kTileTokens, --left;
    if (left == 0) {
      enter_next(p);
      return;
    }
    if (position >= tokens) enter_cache(p, load_row_block<Map>(p, item), position);
    look_up(p);
  }
  // Whether a row block has tiles, and how many.
  __device__ __forceinline__ bool has_tiles(const FmDecodeParams& p, const RowBlock& r) {
    // main_len is never negative. It is looked at so that none of the plan's numbers is on its way where ways meet: ptxas waits
    // there for a register that one of them has asked for, and with it for the next tile's entries.
    const bool own = (Map::kFewRows || r.row_begin < r.rows || p.multicast > 1) && r.main_len >= 0;
    left = own ? r.tiles() : 0;
    return left > 0;
  }
  // To its first one.
  __device__ __forceinline__ void enter(const FmDecodeParams& p, const RowBlock& r) {
    kv_head = r.kv_head;
    enter_cache(p, r, r.tile_begin * kTileTokens);
  }
  // To the first tile after this item.
  __device__ __forceinline__ void enter_next(const FmDecodeParams& p) {
    const int last = next_worker_item(p);
    while (++item < last) {
      const RowBlock r = load_row_block<Map>(p, item);
      if (!has_tiles(p, r)) continue;
      enter(p, r);
      look_up(p);
      return;
    }
    item = kDone, found = -1;
  }
  // Of a row: `at` counts from the beginning of its main cache.
  __device__ __forceinline__ void enter_cache(const FmDecodeParams& p, const RowBlock& r, int at) {
    const bool sparse = p.kv[0].indices != nullptr;
    cache = sparse && at >= r.main_len;
    const int before = cache ? (r.main_len + kTileTokens - 1) / kTileTokens * kTileTokens : 0;
    position = at - before, tokens = sparse && !cache ? r.main_len : r.seq_len - before;
    const FmKvCache& kv = p.kv[cache];
    entries = sparse ? kv.indices + r.request * kv.indices_stride[0] + r.q_begin * kv.indices_stride[1]
                     : p.block_table + r.request * p.block_table_stride;
  }
  __device__ __forceinline__ void look_up(const FmDecodeParams& p) {
    const FmKvCache& kv = p.kv[0];  // only one cache has pages by block table
    int entry = position + row();
    bool here = entry < tokens;
    if (kv.indices == nullptr) {
      entry = page_column(kv, entry);
      here &= entry < p.max_pages;
    }
    found = load_entry(entries + entry, here);
  }
  // Asks the L2 for entries of listed tokens that begin() has come to.
  __device__ __forceinline__ void prefetch_entries(const FmDecodeParams& p) const {
    if (done() || left <= 0 || p.kv[0].indices == nullptr) return;
    const int entry = position + row();
    if (entry < tokens) prefetch_l2(entries + entry);
  }
  // Where the token is.
  __device__ __forceinline__ TokenPlace place(const FmDecodeParams& p) const {
    return in_cache<Map>(p, cache, [&](const FmKvCache& kv) { return place_in(kv); });
  }
  __device__ __forceinline__ TokenPlace place_in(const FmKvCache& kv) const {
    if (found < 0) return {-1, 0};
    const bool sparse = kv.indices != nullptr;
    const int of = sparse ? found : position + row(), column = page_column(kv, of), page = sparse ? column : found;
    return {page < kv.num_pages ? page : -1, of - column * kv.page_size};
  }
};

}  // namespace fm
