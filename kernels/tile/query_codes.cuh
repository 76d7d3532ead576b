// Queries in e4m3, turned into 16-bit numbers on their way to shared memory. Only with the loader of quantised caches,
// where all of Q is there.
#pragma once
#include "../ptx/shared.cuh"
#include "codes.cuh"
#include "work.cuh"

namespace fm {

// By a warpgroup: a thread takes sixteen columns of a row at a time. Rows that do not exist become zeros.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_query_codes(const FmDecodeParams& p, const RowBlock& r, uint32_t shared) {
  constexpr int kPieces = QkDim / 16;  // of a row
#pragma unroll 1
  for (int i = warpgroup_thread(); i < Map::kRows * kPieces; i += 128) {
    const int block_row = i / kPieces, column = i % kPieces * 16, chunk = column / 64;
    const QueryRow<uint8_t> row(p, r, block_row);
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (row.present)
      codes = __ldg(reinterpret_cast<const uint4*>(column < kLatent ? row.nope + column : row.rope + column - kLatent));
    const Values16 v = e4m3_values_and_nan(T(), codes);
    const uint32_t to = shared + chunk * Map::kQueryChunkBytes + swizzled(block_row, column % 64 / 8);
    store_shared(to, v.piece[0]);
    store_shared(to ^ 16, v.piece[1]);
  }
}

}  // namespace fm
