// The TMA loader: one warp keeps the rings full. For page sizes that are multiples of 8; a tile is
// fetched in boxes of gcd(page_size, 64) tokens, each from one page.
#pragma once
#include <cuda.h>

#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "work.cuh"

namespace fm {

// The page ids of the next 32 boxes, one per lane, fetched one window ahead.
struct PageWindow {
  const int* table;
  int lane, base, current, next;

  __device__ __forceinline__ int fetch(const FmDecodeParams& p, const RowBlock& r, int box) const {
    const int token = box * p.box_rows;
    if (token >= r.seq_len) return -1;
    const int page = token / p.page_size;
    if (page >= p.max_pages) return -1;
    const int id = __ldg(table + page);
    return (unsigned)id < (unsigned)p.num_pages ? id : -1;
  }
  __device__ __forceinline__ PageWindow(const FmDecodeParams& p, const RowBlock& r, int first_box)
      : table(p.block_table + r.request * p.block_table_stride), lane(threadIdx.x % 32), base(first_box) {
    current = fetch(p, r, base + lane);
    next = fetch(p, r, base + 32 + lane);
  }
  __device__ __forceinline__ void move_to(const FmDecodeParams& p, const RowBlock& r, int box) {
    if (box - base < 32) return;
    base += 32;
    current = next;
    next = fetch(p, r, base + 32 + lane);
  }
};

// A bit per box to a bit per token.
__device__ __forceinline__ uint64_t spread_boxes(uint32_t boxes, int box_rows) {
  const uint64_t one = box_rows == 64 ? ~0ull : (1ull << box_rows) - 1;
  uint64_t tokens = 0;
  for (int i = 0; i * box_rows < kTileTokens; ++i)
    if (boxes >> i & 1) tokens |= one << (i * box_rows);
  return tokens;
}

// Issues the boxes of one tile column block: `width` chunks of 64 columns starting at `chunk`.
struct TileBoxes {
  const FmDecodeParams& p;
  int first_box, window_base, pages, lane;  // pages: this lane's entry of the window

  __device__ __forceinline__ void load(const CUtensorMap* map, int chunk, uint32_t destination, uint32_t group_bytes,
                                       uint32_t barrier) const {
    const int boxes = kTileTokens / p.box_rows, groups = p.box_rows / 8;
    for (int i = 0; i < boxes; ++i) {
      const int page = __shfl_sync(~0u, pages, first_box - window_base + i);
      if (lane == 0 && page >= 0)
        tma_load_5d(destination + i * groups * group_bytes, map, barrier, 0, 0, chunk,
                    (first_box + i) * p.box_rows % p.page_size / 8, page);
    }
  }
};

template <int QkDim>
__device__ __forceinline__ void load_tiles_tma(const FmDecodeParams& p, const CUtensorMap* latent_map,
                                               const CUtensorMap* rope_map, uint32_t smem, DecodeControl& control) {
  if (warpgroup_thread() >= 32) return;
  const int lane = threadIdx.x % 32, boxes = kTileTokens / p.box_rows;
  if (lane == 0) {
    tma_prefetch_descriptor(latent_map);
    if (QkDim > kLatent) tma_prefetch_descriptor(rope_map);
  }
  Ring<kBlocks> block;
  Ring<kTiles> tile_at;
  for_each_row_block(p, [&](int, const RowBlock& r) {
    if (r.empty()) return;
    PageWindow pages(p, r, r.tile_begin * boxes);
    for (int tile = r.tile_begin; tile < r.tile_end; ++tile) {
      const int first_box = tile * boxes;
      pages.move_to(p, r, first_box);  // boxes divides 32: a tile never straddles two windows
      const uint32_t valid = __ballot_sync(~0u, pages.current >= 0) >> (first_box - pages.base) &
                             (uint32_t)((1ull << boxes) - 1);
      const uint32_t rows = __popc(valid) * p.box_rows;
      const TileBoxes tile_boxes{p, first_box, pages.base, pages.current, lane};

      const uint32_t tile_full = shared_address(&control.tile_full[tile_at.at]);
      mbarrier_wait(shared_address(&control.tile_empty[tile_at.at]), tile_at.parity ^ 1);
      if (lane == 0) {
        control.present[tile_at.at] = spread_boxes(valid, p.box_rows);
        mbarrier_arrive_expect(tile_full, QkDim > kLatent ? rows * 128 : 0);
      }
      if (QkDim > kLatent)
        tile_boxes.load(rope_map, r.kv_head * p.head_chunks_rope, smem + rope_offset(tile_at.at), kAtomBytes,
                        tile_full);
      tile_at.advance();

#pragma unroll 1
      for (int i = 0; i < kTileBlocks; ++i, block.advance()) {
        const uint32_t full = shared_address(&control.block_full[block.at]);
        mbarrier_wait(shared_address(&control.block_empty[block.at]), block.parity ^ 1);
        if (lane == 0) mbarrier_arrive_expect(full, rows * kBlockWidth * 2);
        tile_boxes.load(latent_map, r.kv_head * p.head_chunks_nope + 2 * i, smem + block_offset(block.at), kGroupBytes,
                        full);
      }
    }
  });
}

}  // namespace fm
