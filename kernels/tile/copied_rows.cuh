// Rows of 16-bit numbers on their way to shared memory: copied in pieces of 16 bytes, with the swizzle.
#pragma once
#include <stdint.h>

#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"

namespace fm {

// The row of a token, or null where it is absent. Strides are in bytes.
__device__ __forceinline__ const uint8_t* row_of(const void* base, const int64_t (&stride)[3], TokenPlace at,
                                                 int kv_head) {
  if (at.page < 0) return nullptr;
  return reinterpret_cast<const uint8_t*>(base) + at.page * stride[0] + at.offset * stride[1] +
         opaque(kv_head) * stride[2];
}

__device__ __forceinline__ const uint8_t* shuffle(const uint8_t* pointer, int lane) {
  return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// A piece of 16 bytes `at` bytes into a row, or zeros where the row is null. Some address has to be given all the same.
__device__ __forceinline__ void copy_piece(uint32_t to, const uint8_t* row, int at, const void* any) {
  cp_async_16(to, row == nullptr ? any : row + at, row != nullptr);
}

// Says which of this warp's tokens are there, bit i of `present` being that of its row i.
template <class Map>
__device__ __forceinline__ void leave_present(DecodeControl& control, TilePlace<Map> place, uint32_t present) {
  if (TokenWarps<Map>::lane() == 0)
    store_present<TokenWarps<Map>::kRows>(control.present[place.rope()], TokenWarps<Map>::warp(), present);
}

// Copies the rope parts of this warp's rows, of which a lane knows its own, to a block of [rows][128 bytes]. Eight lanes to a row.
template <class Map>
__device__ __forceinline__ void copy_rope_parts(const uint8_t* own, const void* any, uint32_t to) {
  const int lane = TokenWarps<Map>::lane();
#pragma unroll 4
  for (int i = lane / 8; i < TokenWarps<Map>::kRows; i += 4)
    copy_piece(to + swizzled(TokenWarps<Map>::first_row() + i, lane % 8), shuffle(own, i), lane % 8 * 16, any);
}

// Copies this warp's rows, of which a lane knows its own: null where it is absent.
template <int QkDim, class Map>
__device__ __forceinline__ void copy_rows(const uint8_t* own, const uint8_t* own_rope, const void* any, uint32_t smem,
                                          TilePlace<Map> place) {
  const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row();
  const uint32_t to0 = smem + block_offset(place.block(lane / 16));  // pieces lane and lane + 32 of 64; 16 to a block
  const uint32_t to1 = smem + block_offset(place.block(2 + lane / 16));
#pragma unroll 8
  for (int i = 0; i < TokenWarps<Map>::kRows; ++i) {
    const uint8_t* row = shuffle(own, i);
    const uint32_t in_block = latent_swizzled(first_row + i, lane % 16);
    copy_piece(to0 + in_block, row, lane * 16, any);
    copy_piece(to1 + in_block, row, lane * 16 + 512, any);
  }
  if constexpr (QkDim > kLatent) copy_rope_parts<Map>(own_rope, any, smem + Map::rope_offset(place.rope()));
}

}  // namespace fm
