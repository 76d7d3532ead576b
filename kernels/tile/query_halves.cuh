// Queries as halves in shared memory, for the products with converted codes. A row of bf16 counts in a power of two
// (RowUnit), e4m3 in the row's own scale; scores are multiplied with that.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "codes.cuh"
#include "masking.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

// Of an e4m3 query, at least: masked scores, which are minus infinity, are multiplied with it, and 0 would make NaN of them.
constexpr float kLeastScale = 0x1p-100f;

// Pieces of eight columns of a row, every eighth one of it. The first `Halves` of them become halves, others stay T.
template <class T, int QkDim, int Halves = 8>
struct QueryPieces {
  static constexpr int kCount = QkDim / 64;
  uint4 piece[kCount];

  // Halves from 16-bit numbers, and T for the rope part; returns what they count in. Eight neighbouring lanes have a row.
  __device__ __forceinline__ float load(const FmDecodeParams& p, const RowBlock& r, int block_row, int first) {
    ask(p, r, block_row, first);
    return to_half();
  }
  // As they are.
  __device__ __forceinline__ void ask(const FmDecodeParams& p, const RowBlock& r, int block_row, int first) {
    const QueryRow<T> row(p, r, block_row);
    const uint4* nope = reinterpret_cast<const uint4*>(row.nope) + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      piece[i] = load_once(i < 8 ? nope + 8 * i : reinterpret_cast<const uint4*>(row.rope) + first);
  }
  // From what the pieces have as T.
  __device__ __forceinline__ float to_half() {
    if (std::is_same<T, __half>::value) return 1.f;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = max(largest, largest_bf16(piece[i]));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const RowUnit unit(largest);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      piece[i] = i < Halves ? bf16_to_half(piece[i], unit.inverse_pair()) : bf16_times(piece[i], unit.inverse_pair());
    return unit.unit();
  }
  // The same from e4m3.
  __device__ __forceinline__ float load_codes(const FmDecodeParams& p, const RowBlock& r, int block_row, int first) {
    const QueryRow<uint8_t> row(p, r, block_row);
    const float scale = query_scale(p, r, block_row);
    const uint32_t sign = scale < 0.f ? 0x80808080u : 0;
    const uint2* nope = reinterpret_cast<const uint2*>(row.nope) + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint2 codes = load_once(i < 8 ? nope + 8 * i : reinterpret_cast<const uint2*>(row.rope) + first);
      piece[i] = e4m3_to_half(codes.x ^ sign, codes.y ^ sign);
      if (i >= Halves) piece[i] = half_to(T(), piece[i]);
    }
    return fabsf(scale) < kLeastScale ? kLeastScale : fabsf(scale);  // NaN stays
  }
};

// Q of an item to shared memory, by a warpgroup, eight threads to a row. Rows that do not exist are copies of one that
// does: what is computed for them is never stored.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_query_halves(const FmDecodeParams& p, const RowBlock& r, uint8_t* smem) {
  const int first = warpgroup_thread() % 8;
  named_barrier<kScoresBarrier, 128>();  // every warp is done with the previous item's Q
#pragma unroll 1
  for (int block_row = warpgroup_thread() / 8; block_row < Map::kRows; block_row += 16) {
    QueryPieces<T, QkDim> q;
    const float unit = p.q_codes ? q.load_codes(p, r, block_row, first) : q.load(p, r, block_row, first);
    const uint32_t to = shared_address(smem) + Map::kQueryOffset + swizzled(block_row, first);
#pragma unroll
    for (int i = 0; i < q.kCount; ++i) store_shared(to + i * Map::kQueryChunkBytes, q.piece[i]);
    if (first == 0) units_of<Map>(smem).of_query[block_row] = unit;
  }
  fence_async_shared();
  named_barrier<kScoresBarrier, 128>();
}

// What the scores of a row are multiplied with, base 2.
template <class Map>
__device__ __forceinline__ float score_scale(const FmDecodeParams& p, uint8_t* smem, int block_row) {
  if constexpr (Map::kCodes)
    return p.scale_log2 * units_of<Map>(smem).of_query[block_row];
  else
    return p.scale_log2;
}

}  // namespace fm
