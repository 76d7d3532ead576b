// Q of an item as halves in shared memory, for the products with raw rows. Of each 16 columns c is where the K operand has
// it: k = 2 (c / 4) + c % 2 + 8 (c % 4 / 2). Where those columns may also lie as halves, even ones first (the last 64 of
// rows of 512), c is at k = c / 2 + 8 (c % 2). A rope part that is not codes is in order.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/shared.cuh"
#include "query_halves.cuh"
#include "raw_map.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

// Eight columns, half of 16. `interleaved`: even ones first.
__device__ __forceinline__ void store_raw_query(uint32_t chunk, int block_row, int first, uint4 v, bool interleaved) {
  uint2 low = make_uint2(v.x, v.z), high = make_uint2(v.y, v.w);
  if (interleaved) {
    low = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
    high = make_uint2(__byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
  }
  const int piece = first / 2 * 2, half = first % 2 * 8;
  store_shared(chunk + swizzled(block_row, piece) + half, low);
  store_shared(chunk + swizzled(block_row, piece + 1) + half, high);
}

// What a row's scores are multiplied with, that counts in `unit`.
template <class T, class Map>
__device__ __forceinline__ float query_scale_log2(const FmDecodeParams& p, float unit) {
  return p.scale_log2 * unit * (kRopeCounts<T> ? common_unit<Map>() : 1.f);
}

template <class T, int QkDim, class Map>
using RawQueryPieces = QueryPieces<T, QkDim, Map::kKeyGroups / 2>;

// A row, by eight threads; returns what it counts in. `load(q)`: its 16-bit numbers as they are.
template <class T, int QkDim, class Map, class Load>
__device__ __forceinline__ float place_query_row(const FmDecodeParams& p, const RowBlock& r, uint32_t to, int block_row,
                                                 int first, Load load) {
  constexpr int kHalves = Map::kKeyGroups / 2;
  RawQueryPieces<T, QkDim, Map> q;
  float unit;
  if (p.q_codes) {
    unit = q.load_codes(p, r, block_row, first);
  } else {
    load(q);
    unit = q.to_half();
  }
#pragma unroll
  for (int i = 0; i < q.kCount; ++i) {
    const uint32_t chunk = to + i * Map::kQueryChunkBytes;
    if (i < kHalves)
      store_raw_query(chunk, block_row, first, q.piece[i], Map::kMayBePlain && i == 7);
    else
      store_shared(chunk + swizzled(block_row, first), kRopeCounts<T> ? bf16_times(q.piece[i], common_unit_inverse_pair<Map>()) : q.piece[i]);
  }
  return unit;
}

// Whether there are registers for Q of the next item while an item ends.
template <class T, class Map>
constexpr bool kQueryAhead = Map::kRows == 16 && !Map::kBare && (Map::kHasRope || !kSharesTiles<Map>) && (kRopeCounts<T> || !Map::kScaledWeights);

// Q of an item, as it is, on its way to registers while the item before ends, where there are some.
template <class T, int QkDim, class Map, bool Ahead = kQueryAhead<T, Map>>
struct QueryAhead {
  RawQueryPieces<T, QkDim, Map> row;  // eight threads have one

  static __device__ __forceinline__ int block_row() { return (block_thread() - 128) / 8; }
  // What was there is in no register while tiles are multiplied.
  __device__ __forceinline__ void forget() { row = {}; }
  __device__ __forceinline__ void ask(const FmDecodeParams& p, const RowBlock& r) {
    if (!p.q_codes && block_row() < Map::kRows) row.ask(p, r, block_row(), block_thread() % 8);
  }
  // By two warpgroups, as load_raw_query.
  template <class Control>
  __device__ __forceinline__ void place(const FmDecodeParams& p, const RowBlock& r, uint32_t smem, Control& control) const {
    named_barrier<kRawBarrier, 256>();  // every warp is done with the previous item's Q
    if (block_row() < Map::kRows) {
      const float unit = place_query_row<T, QkDim, Map>(p, r, smem + Map::kQueryOffset, block_row(), block_thread() % 8,
                                                        [&](RawQueryPieces<T, QkDim, Map>& q) { q = row; });
      if (block_thread() % 8 == 0) control.begin_row(block_row(), query_scale_log2<T, Map>(p, unit));
    }
    fence_async_shared();
    named_barrier<kRawBarrier, 256>();
  }
};

// By two warpgroups, eight threads to a row: first all of it to shared memory as it is, then row by row to where it belongs.
// Rows that do not exist are copies of one that does: what is computed for them is never stored. Leaves what each row's
// scores are to be multiplied with, and no reference yet.
template <class T, int QkDim, class Map, class Control>
__device__ __forceinline__ void load_raw_query(const FmDecodeParams& p, const RowBlock& r, uint32_t smem,
                                               Control& control) {
  const int thread = block_thread() - 128;
  const int first = thread % 8;
  const uint32_t to = smem + Map::kQueryOffset;
  named_barrier<kRawBarrier, 256>();  // every warp is done with the previous item's Q
  if (!p.q_codes) {
#pragma unroll 1
    for (int block_row = thread / 8; block_row < Map::kRows; block_row += 32) {
      const QueryRow<T> row(p, r, block_row);
      const uint32_t at = to + swizzled(block_row, first);
#pragma unroll
      for (int i = 0; i < 8; ++i) cp_async_16(at + i * Map::kQueryChunkBytes, row.nope + i * 64 + first * 8, true);
      if (Map::kHasRope) cp_async_16(at + 8 * Map::kQueryChunkBytes, row.rope + first * 8, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
  }
#pragma unroll 1
  for (int block_row = thread / 8; block_row < Map::kRows; block_row += 32) {
    const float unit = place_query_row<T, QkDim, Map>(p, r, to, block_row, first, [&](RawQueryPieces<T, QkDim, Map>& q) {
#pragma unroll
      for (int i = 0; i < q.kCount; ++i) q.piece[i] = load_shared_4(to + i * Map::kQueryChunkBytes + swizzled(block_row, first));
      __syncwarp();  // pieces of two threads change places
    });
    if (first == 0) control.begin_row(block_row, query_scale_log2<T, Map>(p, unit));
  }
  fence_async_shared();
  named_barrier<kRawBarrier, 256>();
}

template <class T, int QkDim, class Map>
struct QueryAhead<T, QkDim, Map, false> {
  __device__ __forceinline__ void forget() {}
  __device__ __forceinline__ void ask(const FmDecodeParams&, const RowBlock&) {}
  template <class Control>
  __device__ __forceinline__ void place(const FmDecodeParams& p, const RowBlock& r, uint32_t smem, Control& control) const {
    load_raw_query<T, QkDim, Map>(p, r, smem, control);
  }
};

}  // namespace fm
