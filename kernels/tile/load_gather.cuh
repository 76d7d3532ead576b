// The gather loader: warps copy single rows in 16-byte pieces and place the swizzle by hand. For any page size and any
// 16-byte aligned strides. Half of the warps take the even tiles, half the odd ones, so that two tiles are in flight;
// a warp copies its rows one by one, all lanes along one row. Copies are limited by what each warp can issue: kernels
// with registers to spare have eight loading warps instead of four.
#pragma once
#include <type_traits>

#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "work.cuh"

namespace fm {

template <class Map>
struct GatherWarps {
  static constexpr int kOfTile = Map::kSplits ? 4 : 2;  // warps that copy one tile
  static constexpr int kThreads = 2 * kOfTile * 32;
  static constexpr int kRows = kTileTokens / kOfTile;  // of a warp; a lane knows one
  static_assert(kRows <= 32);

  static __device__ __forceinline__ int thread() {
    return kThreads == 128 ? warpgroup_thread() : block_thread() - (FM_DECODE_THREADS - 128);
  }
  static __device__ __forceinline__ int first_row() { return thread() / 32 % kOfTile * kRows; }
};

// Where a token is: its page (-1 when absent) and its offset in it.
struct TokenPlace {
  int page, offset;
};

__device__ __forceinline__ TokenPlace locate_token(const FmDecodeParams& p, const RowBlock& r, int token) {
  if (token >= r.seq_len) return {-1, 0};
  const int column = token / p.page_size;
  if (column >= p.max_pages) return {-1, 0};
  const int page = load_once(p.block_table + opaque(r.request) * p.block_table_stride + column);
  return {(unsigned)page < (unsigned)p.num_pages ? page : -1, token - column * p.page_size};
}

template <class T>
__device__ __forceinline__ const T* row_of(const FmDecodeParams& p, const void* base, const int64_t (&stride)[3],
                                           TokenPlace at, int kv_head) {
  if (at.page < 0) return nullptr;
  return reinterpret_cast<const T*>(base) + at.page * stride[0] + at.offset * stride[1] + opaque(kv_head) * stride[2];
}

template <class T>
__device__ __forceinline__ const T* shuffle(const T* pointer, int lane) {
  return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// A piece of 16 bytes of a row, or zeros where the row is null. Some address has to be given all the same.
template <class T>
__device__ __forceinline__ void copy_piece(uint32_t to, const T* row, int piece, const void* any) {
  cp_async_16(to, row == nullptr ? any : row + piece * 8, row != nullptr);
}

// Issues the copies of this warp's rows of a tile; `at` is the place of this lane's row.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void copy_rows(const FmDecodeParams& p, int kv_head, TokenPlace at, uint32_t smem,
                                          TilePlace<Map> place) {
  {
    const int lane = GatherWarps<Map>::thread() % 32, first_row = GatherWarps<Map>::first_row();
    const T* own = row_of<T>(p, p.kv_nope, p.kv_nope_stride, at, opaque(kv_head));
    const uint32_t to0 = smem + block_offset(place.block(lane / 16));  // pieces lane and lane + 32 of 64; 16 to a block
    const uint32_t to1 = smem + block_offset(place.block(2 + lane / 16));
#pragma unroll 1
    for (int i = 0; i < GatherWarps<Map>::kRows; ++i) {
      const T* row = shuffle(own, i);
      const uint32_t in_block = latent_swizzled(first_row + i, lane % 16);
      copy_piece(to0 + in_block, row, lane, p.kv_nope);
      copy_piece(to1 + in_block, row, lane + 32, p.kv_nope);
    }
  }
  if constexpr (QkDim > kLatent) {
    const int lane = GatherWarps<Map>::thread() % 32, first_row = GatherWarps<Map>::first_row();
    const T* own = row_of<T>(p, p.kv_rope, p.kv_rope_stride, at, kv_head);
#pragma unroll 1
    for (int i = lane / 8; i < GatherWarps<Map>::kRows; i += 4)  // eight lanes to a row
      copy_piece(smem + Map::rope_offset(place.rope()) + swizzled(first_row + i, lane % 8), shuffle(own, i), lane % 8,
                 p.kv_rope);
  }
}

// Says that this warp's copies of a tile have landed.
template <class Map>
__device__ __forceinline__ void publish_tile(DecodeControl& control, TilePlace<Map> place) {
  fence_async_shared();
  arrive_once_per_warp(shared_address(&control.tile_full[place.rope()]));
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i)
    arrive_once_per_warp(shared_address(&control.block_full[place.block(i)]));
}

template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_tile_gather(const FmDecodeParams& p, int item, int tile, uint32_t smem,
                                                 DecodeControl& control, TilePlace<Map> place) {
  const RowBlock r = load_row_block<Map>(p, item);
  const TokenPlace at = locate_token(
      p, r, tile * kTileTokens + GatherWarps<Map>::first_row() + GatherWarps<Map>::thread() % GatherWarps<Map>::kRows);
  mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
  const uint32_t present = __ballot_sync(~0u, at.page >= 0);
  using Bits = typename std::conditional<GatherWarps<Map>::kRows == 32, uint32_t, uint16_t>::type;  // of a warp's rows
  if (GatherWarps<Map>::thread() % 32 == 0)
    reinterpret_cast<Bits*>(&control.present[place.rope()])[GatherWarps<Map>::first_row() / GatherWarps<Map>::kRows] =
        (Bits)present;
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i)
    mbarrier_wait(shared_address(&control.block_empty[place.block(i)]), place.block_parity(i) ^ 1);
  copy_rows<T, QkDim, Map>(p, r.kv_head, at, smem, place);
  cp_async_commit();
  cp_async_wait<0>();
  publish_tile<Map>(control, place);
}

template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_tiles_gather(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  TilePlace<Map> place;
  for_each_row_block<Map>(p, [&](int item, const RowBlock& range) {
    // The end is read again for every tile: registers are short.
#pragma unroll 1
    for (int tile = range.tile_begin; tile < load_row_block<Map>(p, item).tile_end; ++tile) {
      if (place.count % 2 == GatherWarps<Map>::thread() / (GatherWarps<Map>::kThreads / 2))
        load_tile_gather<T, QkDim, Map>(p, item, tile, smem, control, place);
      place.advance();
    }
  });
}

}  // namespace fm
