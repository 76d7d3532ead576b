// The token loader: warps fetch single rows and place the swizzle by hand. For any page size, for caches of single
// tokens by index (sparse attention), for any 16-byte aligned strides, and for quantised caches.
//
// Where a page or an index points is looked up a tile ahead, over the ends of items. Rows of 16-bit numbers are copied in 16-byte
// pieces by cp.async, whose arrivals nobody waits for here (load_quarters.cuh). Of quantised rows a lane fetches 16 codes into
// registers, a batch of rows at a time, and stores them as halves (coded_rows.cuh).
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/mbarrier.cuh"
#include "coded_rows.cuh"
#include "copied_rows.cuh"
#include "load_quarters.cuh"
#include "shared_map.cuh"
#include "token_cursor.cuh"
#include "work.cuh"

namespace fm {

// Where a tile's rows are.
template <int QkDim, class Map>
__device__ __forceinline__ CodedRows coded_rows(const FmDecodeParams& p, const TileCursor<Map>& at) {
  const FmKvCache& kv = p.kv[at.cache];
  CodedRows rows = {0, 0, 0, at.cache};
  const TokenPlace token = at.place(p);
  const auto in_units = [&](const int64_t (&stride)[3]) {  // of 16 bytes
    return (uint32_t)(stride[0] >> 4) * token.page + (uint32_t)(stride[1] >> 4) * token.offset;
  };
  const bool present = token.page >= 0;
  if (present) {
    rows.row = in_units(kv.row_stride);
    if (kv.format <= FM_KV_FP16)
      rows.other = QkDim > kLatent ? in_units(kv.rope_stride) : 0;
    else if (QkDim == kLatent)
      rows.other = scales_after(kv, token.offset);
  }
  rows.present = __ballot_sync(~0u, present);
  return rows;
}

// A tile of 16-bit numbers beside tiles of codes, whose caches have one KV head.
template <int QkDim, class Map>
__device__ __forceinline__ void copy_tile_as_halves(const FmDecodeParams& p, const CodedRows& rows, uint32_t smem,
                                                    TilePlace<Map> place) {
  const FmKvCache& kv = p.kv[rows.cache];
  const bool present = rows.present >> TokenWarps<Map>::lane() & 1;
  const auto row = [&](const void* base, uint32_t there) {
    return present ? reinterpret_cast<const uint8_t*>(base) + (uint64_t)there * 16 : nullptr;
  };
  copy_rows<QkDim, Map>(row(kv.rows, rows.row), row(kv.rope, rows.other), kv.rows, smem, place);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();  // every lane's copies can be read
  convert_copied_rows<QkDim, Map>(smem, place, rows.present, kv.format == FM_KV_BF16);
}

// A warp's way through its tiles where they may be of codes. Batches of rows take turns in registers: the next is asked
// for as soon as the last one is stored, so that some are always under way, also while places are waited for.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void convert_tiles(const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                              DecodeControl& control) {
  using Batch = RowBatch<T, QkDim, Map>;
  constexpr int kRows = TokenWarps<Map>::kRows, kBatches = 2, kAhead = kBatches * Batch::kRows;
  TilePlace<Map> place;
  TileCursor<Map> cursor;  // a tile ahead
  wait_for_earlier_launches();
  cursor.begin(p, first);
  cursor.start(p);
  bool going = !cursor.done();
  CodedRows rows = coded_rows<QkDim, Map>(p, cursor);
  cursor.advance(p);
  Batch batch[kBatches];
  const auto load_first = [&] {  // of the tile that `rows` has
#pragma unroll
    for (int i = 0; i < kBatches; ++i) batch[i].load(p, rows, i * Batch::kRows);
  };
  load_first();
#pragma unroll 1
  while (going) {
    const int format = p.kv[rows.cache].format;
    const uint32_t present = rows.present;
    uint32_t mantissas = 0;
    mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
    leave_present<Map>(control, place, present);
    const bool e2m1 = QkDim == kLatent && format == FM_KV_FP4_V41;
    if (e2m1 || format <= FM_KV_FP16) {
      if (e2m1)
        convert_e2m1_rows<Map>(p, rows, smem, place);
      else
        copy_tile_as_halves<QkDim, Map>(p, rows, smem, place);
      rows = coded_rows<QkDim, Map>(p, cursor);
      load_first();
    } else {
      LanePlaces<Map> to(smem, place);
#pragma unroll 1
      for (int eight = 0; eight < kRows; eight += 8) {
        // The rows that come when these are stored: kAhead on, in the end the next tile's.
        const auto load_after = [&](Batch& b, int row) {
          const int next = eight + row + kAhead;
          if (next == kRows) rows = coded_rows<QkDim, Map>(p, cursor);
          b.load(p, rows, (unsigned)next % kRows);
        };
        batch[0].template store<0>(format, present >> eight, to, mantissas);
        load_after(batch[0], 0);
        batch[1].template store<1>(format, present >> (eight + 4), to, mantissas);
        load_after(batch[1], 4);
        to.advance();
      }
    }
    leave_scaled<Map>(smem, place, mantissas != 0);
    fence_async_shared();
    arrive_for_warp<32>(shared_address(&control.tile_full[place.rope()]));
    going = !cursor.done();
    cursor.advance(p);
    place.advance();
  }
}

template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_tiles_tokens(const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                                  DecodeControl& control) {
  if constexpr (Map::kCodes)
    convert_tiles<T, QkDim, Map>(p, first, smem, control);
  else
    load_quarters<QkDim, Map>(p, first, smem, control);
}

}  // namespace fm
