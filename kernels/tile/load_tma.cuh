// The TMA loader: four warps keep the rings full. For page sizes that are multiples of 8; a tile is
// fetched in boxes of gcd(page_size, 64) tokens, each from one page. In a cluster, whose CTAs read the same tiles for
// different query rows, the CTAs take turns and each box is written to all of them: the L2 is read once.
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/global.cuh"
#include "../ptx/mbarrier.cuh"
#include "in_step.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

// Whether an item has few tiles for this CTA.
__device__ __forceinline__ bool is_short(const RowBlock& r) { return r.tile_end - r.tile_begin <= 16; }

// Whether a warp of the loader has its turn among those of the cluster's CTAs.
__device__ __forceinline__ bool has_turn(const FmDecodeParams& p, int warp) {
  return ((warp ^ cluster_rank()) & (p.multicast - 1)) == 0;
}

// What the block table has of box `box` of the request: where it is, or null when there is none. Boxes are counted from the request's
// first token.
__device__ __forceinline__ const int* entry_of_box(const FmDecodeParams& p, const RowBlock& r, int box) {
  const int token = box << p.box_shift, column = page_column(p.kv[0], token);
  const bool exists = token < r.seq_len && column < p.max_pages;
  return exists ? p.block_table + r.request * p.block_table_stride + column : nullptr;
}

// The page there, or -1.
template <bool Early>
__device__ __forceinline__ int page_at(const FmDecodeParams& p, const int* entry) {
  if (entry == nullptr) return -1;
  const int page = load_once<Early>(entry);
  return (unsigned)page < (unsigned)p.kv[0].num_pages ? page : -1;
}

// Asks the L2 for what the block table has of the first tile's pages, by one thread.
__device__ __forceinline__ void prefetch_pages(const FmDecodeParams& p, const RowBlock& r) {
  const int column = min(page_column(p.kv[0], r.tile_begin * kTileTokens), p.max_pages - 1);
  if (column >= 0) prefetch_l2(p.block_table + r.request * p.block_table_stride + column);
}

// How the L2 keeps tiles. Where nobody reads them again they go first, so that it keeps parts, plans and instructions; with
// more than 16 rows, whose results are larger, only where units are cut: otherwise loads are slower for it (docs/tried-ends.md, "What the L2 keeps").
// The plan can be read while earlier launches may be running (FirstItem).
template <class Map>
__device__ __forceinline__ uint64_t tile_policy(const FmDecodeParams& p) {
  return p.reads_once && (Map::kRows == 16 || load_once<true>(&p.plan->slots) > 0) ? kEvictFirst : kEvictNormal;
}

// A bit per box to a bit per token.
__device__ __forceinline__ uint64_t spread_boxes(uint32_t boxes, int shift) {
  uint64_t tokens = 0;
  for (int i = 0; i << shift < kTileTokens; ++i)
    if (boxes >> i & 1) tokens |= ~0ull >> (64 - (1 << shift)) << (i << shift);
  return tokens;
}

// This lane's box of a tile; every block of the tile is fetched from the same pages.
struct TileBox {
  int page, group;  // the box's page (-1: none) and its first group of 8 tokens there

  // A block of `atoms` chunks of 64 columns: `map` at chunk coordinate `chunk`, to `destination`. `ctas`: bit mask
  // of the CTAs of the cluster that get it.
  __device__ __forceinline__ void load(const FmDecodeParams& p, const CUtensorMap* map, int chunk, uint32_t destination,
                                       uint32_t atoms, uint32_t barrier, uint32_t ctas, uint64_t policy) const {
    if (page < 0 || ctas == 0) return;
    destination += (threadIdx.x % 32 << opaque(p.box_shift)) / 8 * atoms * kAtomBytes;
    if (ctas == 1)
      tma_load_5d(destination, map, barrier, 0, 0, chunk, group, page, policy);
    else
      tma_multicast_5d(destination, map, barrier, ctas, 0, 0, chunk, group, page, policy);
  }
};

// Bytes of one chunk of 64 columns of the boxes whose bits are set.
__device__ __forceinline__ uint32_t box_bytes(const FmDecodeParams& p, uint32_t boxes) {
  return __popc(boxes) * kChunkRowBytes << opaque(p.box_shift);
}

// The pages of 32 boxes from a multiple of 32 on, one per lane: those around the first box of `tile`. Where this lane's is.
__device__ __forceinline__ const int* window_entry(const FmDecodeParams& p, const RowBlock& r, int tile) {
  const int box = tile * (kTileTokens >> opaque(p.box_shift));
  return entry_of_box(p, r, box / 32 * 32 + threadIdx.x % 32);
}
template <bool Early>
__device__ __forceinline__ int page_window(const FmDecodeParams& p, const RowBlock& r, int tile) {
  return page_at<Early>(p, window_entry(p, r, tile));
}

// This lane's box of a tile, whose pages are in the window.
__device__ __forceinline__ TileBox locate_box(const FmDecodeParams& p, int tile, int window) {
  const int shift = opaque(p.box_shift), boxes = kTileTokens >> shift, lane = threadIdx.x % 32, box = tile * boxes;
  const int page = __shfl_sync(~0u, window, (box + lane) % 32);
  return {lane < boxes ? page : -1, page_offset(p.kv[0], (box + lane) << shift) / 8};
}

// How many of an item's tiles, of few rows, are loaded when the one before them is there: of the first item the second one where clusters
// share tiles, and of short items; with 16 rows all of these. CTAs ask for their first tiles at once, which come sooner if others are
// not asked for yet.
template <class Map>
__device__ __forceinline__ int tiles_one_by_one(const FmDecodeParams& p, const RowBlock& r, bool first) {
  const bool singly = is_short(r) && !p.waits_aside;
  return Map::kRows == 16 && singly ? r.tile_end - r.tile_begin : first && (singly || kSharesTiles<Map>) ? 2 : 0;
}

// Warp w of the loader keeps latent block w of every tile coming, warp 0 also the rope block.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_tiles_tma(const FmDecodeParams& p, const CUtensorMap* latent_map,
                                               const CUtensorMap* rope_map, const FirstItem& first, uint32_t smem,
                                               DecodeControl& control) {
  static_assert(kTileBlocks == 4, "one warp per block of a tile");
  const auto warp = [] { return warpgroup_thread() / 32; };  // read anew each time: registers are short
  const bool leader = threadIdx.x % 32 == 0;
  // Bit mask of the CTAs this warp loads for: all of the cluster, or none, since they take turns.
  const uint32_t ctas = has_turn(p, warp()) ? (1u << p.multicast) - 1 : 0;
  const uint64_t policy = tile_policy<Map>(p);
  TilePlace<Map> place;
  InStep step(Map::kFewRows && warp() == 0 && leader && first.exists() && !is_short(first.block) && !p.waits_aside);
  // Waits for the tile's place, unless it is the CTA's first; held() before its latent block.
  const auto load_tile = [&](int kv_head, const TileBox& box, bool waits, auto held) {
    const uint32_t boxes = __ballot_sync(~0u, box.page >= 0);
    if (warp() == 0) {
      const uint32_t full = shared_address(&control.tile_full[place.rope()]);
      if (waits) mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
      if (leader) {
        if (waits) step.ask(p);
        control.present[place.rope()] = spread_boxes(boxes, opaque(p.box_shift));
        mbarrier_arrive_expect(full, QkDim > kLatent ? box_bytes(p, boxes) : 0);
      }
      __syncwarp();
      if (QkDim > kLatent)
        box.load(p, rope_map, kv_head * p.head_chunks_rope, smem + Map::rope_offset(place.rope()), 1, full, ctas, policy);
    }
    const int block = place.block(warp());
    const uint32_t full = shared_address(&control.block_full[block]);
    if (waits) mbarrier_wait(shared_address(&control.block_empty[block]), place.block_parity(warp()) ^ 1);
    held();
    if (leader) mbarrier_arrive_expect(full, FM_LATENT_BOX_CHUNKS * box_bytes(p, boxes));
    __syncwarp();
    box.load(p, latent_map, kv_head * p.head_chunks_nope + FM_LATENT_BOX_CHUNKS * warp(), smem + block_offset(block),
             FM_LATENT_BOX_CHUNKS, full, ctas, policy);
    place.advance();
  };
  // The first tile of few rows: all but its pages is found before earlier launches are waited for. With 64 rows Q is needed first.
  int window = -1;
  const RowBlock& block = first.block;
  const bool begins = Map::kFewRows && first.exists() && !block.empty();
  const int* entry = begins ? window_entry(p, block, block.tile_begin) : nullptr;
  asm volatile("" : "+l"(entry));
  wait_for_earlier_launches();
  if (begins) {
    window = page_at<false>(p, entry);
    load_tile(block.kv_head, locate_box(p, block.tile_begin, window), false, [] {});
  }
  for_each_row_block<Map>(p, first, [&](int item, const RowBlock& r) {
    const bool begun = Map::kFewRows && item == first.number;
    if (!begun) window = page_window<false>(p, r, r.tile_begin);
    const int one_by_one = r.tile_begin + tiles_one_by_one<Map>(p, r, begun);
#pragma unroll 1
    for (int tile = r.tile_begin + begun; tile < r.tile_end; ++tile) {
      if (tile * (kTileTokens >> opaque(p.box_shift)) % 32 == 0) window = page_window<false>(p, r, tile);
      load_tile(r.kv_head, locate_box(p, tile, window), true, [&] {
        if (holds_tiles<Map>(p, r) && item == first.number && tile == r.tile_begin + 1) named_barrier<kQueryBarrier, 256>();
        if (Map::kFewRows && tile < one_by_one && tile != r.tile_begin) {
          const TilePlace<Map> before = place.before();
          mbarrier_wait(shared_address(&control.block_full[before.block(warp())]), before.block_parity(warp()));
        }
      });
    }
    if (item + 1 < next_worker_item(p)) prefetch_query<T, QkDim, Map>(p, load_row_block<Map>(p, item + 1));
  });
  step.leave(p);
  if (p.multicast > 1) wait_until_used_up<Map>(control, place, warp(), warp() == 0);
}

// Asks the L2 for the first tile while earlier launches may be running, as the loader's warps will load it: a block to each of
// four warps. If the block table is not what it will be, for another.
template <int QkDim>
__device__ __forceinline__ void prefetch_tile(const FmDecodeParams& p, const CUtensorMap* latent_map,
                                              const CUtensorMap* rope_map, const RowBlock& r) {
  const int warp = warpgroup_thread() / 32;
  const TileBox box = locate_box(p, r.tile_begin, page_window<true>(p, r, r.tile_begin));
  if (box.page < 0 || !has_turn(p, warp)) return;
  if (QkDim > kLatent && warp == 0) tma_prefetch_5d(rope_map, 0, 0, r.kv_head * p.head_chunks_rope, box.group, box.page);
  tma_prefetch_5d(latent_map, 0, 0, r.kv_head * p.head_chunks_nope + FM_LATENT_BOX_CHUNKS * warp, box.group, box.page);
}

}  // namespace fm
