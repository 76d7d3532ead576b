// Q of 64 query rows of 16-bit numbers: of its nine chunks of 64 columns the first are in registers, as A operands, the others in
// shared memory, whose places the first ones come through.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/shared.cuh"
#include "masking.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

// The first chunks of this thread's Q rows as wgmma A operands: chunks of 64 columns, 4 steps of k16.
template <int Chunks>
struct QueryFragments {
  uint32_t at[Chunks == 0 ? 1 : Chunks][4][4];

  // Chunk i from shared memory, where this warp's 16 rows begin at `rows`.
  __device__ __forceinline__ void load(int i, uint32_t rows) {
    const int lane = warpgroup_thread() % 32;
#pragma unroll
    for (int k = 0; k < 4; ++k) load_matrices<false>(at[i][k], rows + swizzled(lane % 16, 2 * k + lane / 16));
  }
};

// Copies chunks of a warp's 16 rows of Q to shared memory: a lane has a piece of every fourth row. A row that does not
// exist is a copy of one that does; what is computed for it is never stored.
template <class T>
struct QueryCopies {
  const T* row[4];
  uint32_t to[2];  // rows lane / 8 and 4 on; those 8 on lie kAtomBytes on

  __device__ __forceinline__ void begin(const T* base, int64_t offset, uint32_t rows) {
    const int lane = warpgroup_thread() % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = base + __shfl_sync(~0u, offset, 4 * i + lane / 8) + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = rows + swizzled(4 * i + lane / 8, lane % 8);
  }
  __device__ __forceinline__ void copy(int column, uint32_t slot) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      cp_async_16(to[i % 2] + slot * kRopeBytes + i / 2 * kAtomBytes, row[i] + column, true);
    cp_async_commit();
  }
};

// The rows of Q of a warp: each chunk goes to shared memory, where the last ones and the rope part stay; the first go on
// to registers, through the places of those, so that a few are under way at any time.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_query_rows(const FmDecodeParams& p, const RowBlock& r,
                                                QueryFragments<Map::kRegisterChunks>& q, uint32_t shared) {
  constexpr int kInRegisters = Map::kRegisterChunks, kChunks = QkDim / 64, kSlots = Map::kQuerySlots;
  constexpr int kAhead = kInRegisters < kSlots ? kInRegisters : kSlots;
  const int first = warpgroup_thread() / 32 * 16, own = r.row_begin + first + warpgroup_thread() % 16;
  const int row = own < r.rows ? own : 0;
  const uint32_t rows = shared + first * kChunkRowBytes;
  QueryCopies<T> copies;
  copies.begin(reinterpret_cast<const T*>(p.q_nope), row_offset(p, r, row, p.q_nope_stride), rows);
#pragma unroll
  for (int i = 0; i < kChunks + kAhead; ++i) {
    if (i >= kAhead && i - kAhead < kInRegisters) {
      cp_async_wait<kAhead == 0 ? 0 : kAhead - 1>();
      __syncwarp();
      q.load(i - kAhead, rows + (i - kAhead) % kSlots * kRopeBytes);
      __syncwarp();
    }
    if (i == 8 && QkDim > kLatent)
      copies.begin(reinterpret_cast<const T*>(p.q_rope), row_offset(p, r, row, p.q_rope_stride), rows);
    if (i < kChunks)
      copies.copy(i == 8 ? 0 : i * 64, i % kSlots);
    else
      cp_async_commit();  // nothing, so that as many are pending
  }
}

// Q of an item: fragments to registers; the chunks (64 columns each) after them and the rope part to shared memory.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_query(const FmDecodeParams& p, const RowBlock& r,
                                           QueryFragments<Map::kRegisterChunks>& q, uint32_t shared) {
  named_barrier<kScoresBarrier, 128>();  // every warp is done with the previous item's Q
  load_query_rows<T, QkDim, Map>(p, r, q, shared);
  cp_async_wait<0>();
  fence_async_shared();
  named_barrier<kScoresBarrier, 128>();
}

}  // namespace fm
