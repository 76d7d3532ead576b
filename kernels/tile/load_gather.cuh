// The gather loader: four warps copy single rows in 16-byte pieces and place the swizzle by hand. For any page
// size and any 16-byte aligned strides.
#pragma once
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "work.cuh"

namespace fm {

constexpr int kGatherBarrier = 2;  // named barrier of the loader's four warps

// Page and offset in the page of token `token` of the request; page -1 when there is none.
__device__ __forceinline__ int2 locate_token(const FmDecodeParams& p, const RowBlock& r, int token) {
  if (token >= r.seq_len) return make_int2(-1, 0);
  const int column = token / p.page_size;
  if (column >= p.max_pages) return make_int2(-1, 0);
  const int page = __ldg(p.block_table + r.request * p.block_table_stride + column);
  return make_int2((unsigned)page < (unsigned)p.num_pages ? page : -1, token - column * p.page_size);
}

// Copies this thread's 16-byte pieces of row `row`: `base` points at the piece in page 0, token 0.
template <class T>
__device__ __forceinline__ void copy_piece(uint32_t to, const T* base, const int64_t (&stride)[3], int2 at) {
  const bool present = at.x >= 0;
  cp_async_16(to, present ? base + at.x * stride[0] + at.y * stride[1] : base, present);
}

// Issues the copies of one tile whose tokens are located in `token_at`.
template <class T, int QkDim>
__device__ __forceinline__ void copy_tile(const FmDecodeParams& p, int kv_head, const int2* token_at, uint32_t smem,
                                          Ring<kBlocks> block, int rope) {
  const int thread = warpgroup_thread();
  {
    const int piece = thread % 64;  // four blocks of 16 pieces
    block.advance(piece / 16);
    const T* base = reinterpret_cast<const T*>(p.kv_nope) + kv_head * p.kv_nope_stride[2] + piece * 8;
#pragma unroll 2
    for (int row = thread / 64; row < kTileTokens; row += 2)
      copy_piece(smem + block_offset(block.at()) + latent_swizzled(row, piece % 16), base, p.kv_nope_stride,
                 token_at[row]);
  }
  if constexpr (QkDim > kLatent) {
    const int piece = thread % 8;
    const T* base = reinterpret_cast<const T*>(p.kv_rope) + kv_head * p.kv_rope_stride[2] + piece * 8;
#pragma unroll 1
    for (int row = thread / 8; row < kTileTokens; row += 16)
      copy_piece(smem + rope_offset(rope) + swizzled(row, piece), base, p.kv_rope_stride, token_at[row]);
  }
}

// Says that this warp's copies of a tile have landed.
__device__ __forceinline__ void publish_tile(DecodeControl& control, Ring<kBlocks> block, int tile) {
  fence_async_shared();
  arrive_once_per_warp(shared_address(&control.tile_full[tile]));
  for (int i = 0; i < kTileBlocks; ++i, block.advance())
    arrive_once_per_warp(shared_address(&control.block_full[block.at()]));
}

template <class T, int QkDim>
__device__ __forceinline__ void load_tiles_gather(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  Ring<kBlocks> block, landing_block;
  Ring<kTiles> tile_at;
  int buffer = 0, landing = -1;  // the tile whose copies are still in flight
  for_each_row_block(p, [&](int, const RowBlock& r) {
    for (int tile = r.tile_begin; tile < r.tile_end; ++tile) {
      const int thread = warpgroup_thread();
      mbarrier_wait(shared_address(&control.tile_empty[tile_at.at()]), tile_at.parity() ^ 1);
      if (thread < kTileTokens) {
        const int2 at = locate_token(p, r, tile * kTileTokens + thread);
        control.token_at[buffer][thread] = at;
        const uint32_t present = __ballot_sync(~0u, at.x >= 0);
        if (thread % 32 == 0) reinterpret_cast<uint32_t*>(&control.present[tile_at.at()])[thread / 32] = present;
      }
      const Ring<kBlocks> first_block = block;
      for (int i = 0; i < kTileBlocks; ++i, block.advance())
        mbarrier_wait(shared_address(&control.block_empty[block.at()]), block.parity() ^ 1);
      named_barrier<kGatherBarrier, 128>();
      copy_tile<T, QkDim>(p, r.kv_head, control.token_at[buffer], smem, first_block, tile_at.at());
      cp_async_commit();
      if (landing >= 0) {
        cp_async_wait<1>();
        publish_tile(control, landing_block, landing);
      }
      landing = tile_at.at();
      landing_block = first_block;
      buffer ^= 1;
      tile_at.advance();
    }
  });
  if (landing >= 0) {
    cp_async_wait<0>();
    publish_tile(control, landing_block, landing);
  }
}

}  // namespace fm
