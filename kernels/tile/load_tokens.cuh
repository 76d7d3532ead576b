// The token loader: warps fetch single rows and place the swizzle by hand. For any page size, for caches of single
// tokens by index (sparse attention), for any 16-byte aligned strides, and for quantised caches.
//
// Half of the warps take the even tiles, half the odd ones, so that two tiles are in flight. A warp goes through its rows
// one by one, all lanes along one row: rows of 16-bit numbers are copied in 16-byte pieces by cp.async; of quantised rows
// a lane fetches 16 codes into registers, several rows at a time, and stores them as 16-bit numbers. Where a page or an
// index points is looked up two tiles ahead, and the rows of the next tile are called to the L2.
#pragma once
#include <type_traits>

#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/shared.cuh"
#include "codes.cuh"
#include "work.cuh"

namespace fm {

template <class Map>
struct TokenWarps {
  // Warps that fetch one tile: as many as registers allow, up to where more were no faster.
  static constexpr int kOfTile = Map::kRows == 16 ? 8 : Map::kRows == 32 ? 4 : 2;
  static constexpr int kThreads = 2 * kOfTile * 32;
  static constexpr int kRows = kTileTokens / kOfTile;  // of a warp; a lane knows one
  static_assert(kRows <= 32);

  static __device__ __forceinline__ int thread() { return block_thread() - (FM_DECODE_THREADS - 128); }
  static __device__ __forceinline__ int lane() { return block_thread() % 32; }
  static __device__ __forceinline__ int half() { return thread() / (kThreads / 2); }
  static __device__ __forceinline__ int first_row() { return thread() / 32 % kOfTile * kRows; }
};

// Where a token is: its page (-1 when absent) and its offset in it.
struct TokenPlace {
  int page, offset;
};

// The tokens of a tile: which cache they are in, and which positions there. Tiles of a row's extra cache follow those of
// its main cache.
struct TilePositions {
  int cache, first, end;

  __device__ __forceinline__ TilePositions(const FmDecodeParams& p, const RowBlock& r, int tile) {
    const int position = tile * kTileTokens;
    const bool sparse = p.kv[0].indices != nullptr;
    cache = 0, first = position, end = sparse ? r.main_len : r.seq_len;
    if (sparse && position >= r.main_len) {
      const int before = (r.main_len + kTileTokens - 1) / kTileTokens * kTileTokens;
      cache = 1, first = position - before, end = r.seq_len - before;
    }
  }
};

// What the block table or the list of indices says of a token of a tile; -1 where there is none.
__device__ __forceinline__ int look_up(const FmDecodeParams& p, const RowBlock& r, int tile, int row) {
  const TilePositions tokens(p, r, tile);
  const FmKvCache& kv = p.kv[tokens.cache];
  const int position = tokens.first + row;
  if (tile >= r.tile_end || position >= tokens.end) return -1;
  if (kv.indices != nullptr)
    return load_once(kv.indices + r.request * kv.indices_stride[0] + r.q_begin * kv.indices_stride[1] + position);
  const int column = position / kv.page_size;
  return column < p.max_pages ? load_once(p.block_table + r.request * p.block_table_stride + column) : -1;
}

// Where a token is of which `found` was looked up.
__device__ __forceinline__ TokenPlace place_of(const FmKvCache& kv, int found, int tile, int row) {
  if (found < 0) return {-1, 0};
  const bool sparse = kv.indices != nullptr;
  const int page = sparse ? found / kv.page_size : found;
  return {page < kv.num_pages ? page : -1, (sparse ? found : tile * kTileTokens + row) % kv.page_size};
}

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

// Copies 128 bytes, `at` bytes into each of this warp's rows, to a block of [rows][128 bytes] or one chunk of a latent
// block: `to_row` gives the address of a piece. Eight lanes to a row.
template <class Map, class ToRow>
__device__ __forceinline__ void copy_chunk(const uint8_t* own, int at, const void* any, ToRow to_row) {
  const int lane = TokenWarps<Map>::lane();
#pragma unroll 1
  for (int i = lane / 8; i < TokenWarps<Map>::kRows; i += 4)
    copy_piece(to_row(TokenWarps<Map>::first_row() + i, lane % 8), shuffle(own, i), at + lane % 8 * 16, any);
}

// Leaves the scales of a row's groups, and the quotients by which scores are scaled (scores.cuh). For those, scales that
// add nothing to a sum of float32 products are as if a little larger: quotients stay in range.
template <class Map>
__device__ __forceinline__ void leave_scales(float4 scale, int row, uint32_t smem, TilePlace<Map> place) {
  if constexpr (Map::kScaleGroups > 1) {
    const uint32_t to = smem + Map::scale_offset(place.rope()) + row * 4;
    const float s[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
    for (int g = 0; g < 4; ++g) store_shared(to + g * kTileTokens * 4, s[g]);
    if constexpr (Map::kScaleRows > Map::kScaleGroups) {
      const float top = fmaxf(fmaxf(fabsf(s[0]), fabsf(s[1])), fmaxf(fabsf(s[2]), fabsf(s[3])));
      const float least = fmaxf(top * 0x1p-60f, 0x1p-120f);
      float of_scores[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) of_scores[g] = fabsf(s[g]) < least ? least : s[g];
#pragma unroll
      for (int g = 0; g < 4; ++g)
        store_shared(to + (4 + g) * kTileTokens * 4, g < 3 ? __fdividef(of_scores[g], of_scores[g + 1]) : of_scores[3]);
    }
  }
}

// ---- rows of 16-bit numbers ----

template <int QkDim, class Map>
__device__ __forceinline__ void copy_rows(const FmKvCache& kv, int kv_head, TokenPlace at, uint32_t smem,
                                          TilePlace<Map> place) {
  const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row();
  {
    const uint8_t* own = row_of(kv.rows, kv.row_stride, at, kv_head);
    const uint32_t to0 = smem + block_offset(place.block(lane / 16));  // pieces lane and lane + 32 of 64; 16 to a block
    const uint32_t to1 = smem + block_offset(place.block(2 + lane / 16));
#pragma unroll 1
    for (int i = 0; i < TokenWarps<Map>::kRows; ++i) {
      const uint8_t* row = shuffle(own, i);
      const uint32_t in_block = latent_swizzled(first_row + i, lane % 16);
      copy_piece(to0 + in_block, row, lane * 16, kv.rows);
      copy_piece(to1 + in_block, row, lane * 16 + 512, kv.rows);
    }
  }
  if constexpr (QkDim > kLatent) {
    const uint32_t to = smem + Map::rope_offset(place.rope());
    copy_chunk<Map>(row_of(kv.rope, kv.rope_stride, at, kv_head), 0, kv.rows,
                    [&](int row, int piece) { return to + swizzled(row, piece); });
  }
  if (lane < TokenWarps<Map>::kRows)  // numbers without scales may stand beside tiles of codes with scales
    leave_scales<Map>(make_float4(1.f, 1.f, 1.f, 1.f), first_row + lane, smem, place);
}

// ---- quantised rows ----

// Where a quantised row's scales begin, in bytes from the row's own beginning.
__device__ __forceinline__ int scales_after(const FmKvCache& kv, int offset) {
  switch (kv.format) {
    case FM_KV_FP8_V4: return (kv.page_size - offset) * 576 + offset * 8;
    case FM_KV_FP8_V41_SPLIT: return (kv.page_size - offset) * 512 + offset * 16;
    case FM_KV_FP4_V41: return 256;
    default: return 512;
  }
}

__device__ __forceinline__ uint4 load_codes(const uint8_t* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_byte(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}

// This lane's sixteen columns of a row, on their way: codes, and the scale of their group.
struct LaneCodes {
  uint4 codes;
  uint32_t scale;

  // `lane_scale`: how many lanes share a scale, as a shift; below 0: scales are not the lane's business.
  __device__ __forceinline__ void load(const uint8_t* row, int scales, int format, int lane, int lane_scale) {
    codes = make_uint4(0, 0, 0, 0), scale = 0;
    if (row == nullptr) return;
    if (format == FM_KV_FP4_V41) {
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(codes.x), "=r"(codes.y) : "l"(row + lane * 8));
    } else {
      codes = load_codes(row + lane * 16);
    }
    if (lane_scale >= 0) scale = load_byte(row + scales + (lane >> lane_scale));
  }

  template <class T>
  __device__ __forceinline__ Values16 values(int format, int lane_scale) const {
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      if (format == FM_KV_FP4_V41) return e2m1_values(make_uint2(codes.x, codes.y), scale);
      if (lane_scale >= 0) {
        const Values16 v = e4m3_values(T(), codes, unit_of_scale(scale));
        return scale > kMostScale ? scale_on(v, scale) : v;
      }
    }
    return e4m3_values(T(), codes, kE4m3Unit);
  }
};

// Sixteen columns of a row, from column 16 x lane on. Lanes of odd chunks store their second piece first: the eight
// lanes of a phase then use all banks.
__device__ __forceinline__ void store_values(const Values16& v, uint32_t block, int row, int lane) {
  const bool odd = lane & 4;
  const uint32_t to = block + latent_swizzled(row, lane * 2 % 16 + odd);
  store_shared(to, odd ? v.piece[1] : v.piece[0]);
  store_shared(to ^ 16, odd ? v.piece[0] : v.piece[1]);
}

// What a row has besides its 512 columns of codes: rope part and scales of groups.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void fetch_rest(const FmKvCache& kv, const uint8_t* own, uint32_t smem,
                                           TilePlace<Map> place) {
  const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row();
  if constexpr (QkDim == kLatent) {
    if (kv.format != FM_KV_FP8_V4) return;
    const uint32_t to = smem + block_offset(place.block(3));  // the last 64 columns, in bfloat16
    copy_chunk<Map>(own, 448, kv.rows, [&](int row, int piece) { return to + latent_swizzled(row, 8 + piece); });
  } else if constexpr (Map::kScaleGroups > 1) {
    const uint32_t to = smem + Map::rope_offset(place.rope());
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      copy_chunk<Map>(own, 528, kv.rows, [&](int row, int piece) { return to + swizzled(row, piece); });
    } else {
#pragma unroll 1
      for (int i = lane / 8; i < TokenWarps<Map>::kRows; i += 4) {
        const uint8_t* row = shuffle(own, i);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row != nullptr) v = load_codes(row + 528 + lane % 8 * 16);
        v = make_uint4(bf16_to_fp16(v.x), bf16_to_fp16(v.y), bf16_to_fp16(v.z), bf16_to_fp16(v.w));
        store_shared(to + swizzled(first_row + i, lane % 8), v);
      }
    }
    if (lane < TokenWarps<Map>::kRows) {
      const uint4 v = own == nullptr ? make_uint4(0, 0, 0, 0) : load_codes(own + 512);
      leave_scales<Map>(make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                                    __uint_as_float(v.w)),
                        first_row + lane, smem, place);
    }
  } else {  // the rope part is codes as well
    const uint32_t to = smem + Map::rope_offset(place.rope());
#pragma unroll 1
    for (int i = lane / 4; i < TokenWarps<Map>::kRows; i += 8) {
      const uint8_t* row = shuffle(own, i);
      const Values16 v = e4m3_values(T(), row == nullptr ? make_uint4(0, 0, 0, 0) : load_codes(row + 512 + lane % 4 * 16),
                                     kE4m3Unit);
      store_shared(to + swizzled(first_row + i, lane % 4 * 2), v.piece[0]);
      store_shared(to + swizzled(first_row + i, lane % 4 * 2 + 1), v.piece[1]);
    }
  }
}

// Rows that a warp fetches before it converts the first: what registers allow.
template <int QkDim, class Map>
constexpr int kTileBatch = Map::kRows == 16 && QkDim == kLatent ? 2 : 4;

template <class T, int QkDim, class Map>
__device__ __forceinline__ void convert_rows(const FmKvCache& kv, TokenPlace at, uint32_t smem, DecodeControl& control,
                                             TilePlace<Map> place) {
  constexpr int kBatch = kTileBatch<QkDim, Map>;  // rows on their way at a time
  const int lane = TokenWarps<Map>::lane();
  const int format = QkDim > kLatent ? (Map::kScaleGroups > 1 ? FM_KV_FP8_V32 : FM_KV_FP8) : kv.format;
  const bool grouped = QkDim == kLatent && format != FM_KV_FP8;
  const int lane_scale = !grouped ? -1 : format == FM_KV_FP4_V41 ? 0 : format == FM_KV_FP8_V4 ? 2 : 1;
  const uint8_t* own = row_of(kv.rows, kv.row_stride, at, 0);
  const int own_scales = grouped ? scales_after(kv, at.offset) : 0;
  const bool of_codes = format != FM_KV_FP8_V4 || lane < 28;
  const uint32_t block = smem + block_offset(place.block(lane / 8));
#pragma unroll 1
  for (int first = 0; first < TokenWarps<Map>::kRows; first += kBatch) {
    LaneCodes batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint8_t* row = shuffle(own, first + i);
      const int scales = grouped ? __shfl_sync(~0u, own_scales, first + i) : 0;
      batch[i].load(of_codes ? row : nullptr, scales, format, lane, lane_scale);
    }
    if (first == 0) {
      fetch_rest<T, QkDim, Map>(kv, own, smem, place);
#pragma unroll 1
      for (int i = 0; i < kTileBlocks; ++i)
        mbarrier_wait(shared_address(&control.block_empty[place.block(i)]), place.block_parity(i) ^ 1);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (of_codes)
        store_values(batch[i].template values<T>(format, lane_scale), block, TokenWarps<Map>::first_row() + first + i,
                     lane);
  }
}

// ---- tiles ----

// Says that this warp's rows of a tile have landed.
template <class Map>
__device__ __forceinline__ void publish_tile(DecodeControl& control, TilePlace<Map> place) {
  fence_async_shared();
  arrive_once_per_warp(shared_address(&control.tile_full[place.rope()]));
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i)
    arrive_once_per_warp(shared_address(&control.block_full[place.block(i)]));
}

template <class T, int QkDim, class Map, bool Quantised>
__device__ __forceinline__ void load_tile(const FmKvCache& kv, int kv_head, TokenPlace at, uint32_t smem,
                                          DecodeControl& control, TilePlace<Map> place) {
  constexpr int kRows = TokenWarps<Map>::kRows;
  mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
  const uint32_t present = __ballot_sync(~0u, at.page >= 0);
  using OfFew = typename std::conditional<kRows == 16, uint16_t, uint8_t>::type;
  using Bits = typename std::conditional<kRows == 32, uint32_t, OfFew>::type;  // of a warp's rows
  if (TokenWarps<Map>::lane() == 0)
    reinterpret_cast<Bits*>(&control.present[place.rope()])[TokenWarps<Map>::first_row() / kRows] = (Bits)present;
  if (Quantised && kv.format > FM_KV_FP16) {
    convert_rows<T, QkDim, Map>(kv, at, smem, control, place);
  } else {
#pragma unroll 1
    for (int i = 0; i < kTileBlocks; ++i)
      mbarrier_wait(shared_address(&control.block_empty[place.block(i)]), place.block_parity(i) ^ 1);
    copy_rows<QkDim, Map>(kv, kv_head, at, smem, place);
  }
  cp_async_commit();
  cp_async_wait<0>();
  publish_tile<Map>(control, place);
}

// Calls the rows of a later tile to the L2: a lane its own row.
__device__ __forceinline__ void prefetch_row(const FmKvCache& kv, TokenPlace at, int kv_head) {
  const uint8_t* row = row_of(kv.rows, kv.row_stride, at, kv_head);
  if (row == nullptr) return;
#pragma unroll 1
  for (int i = 0; i < kv.row_bytes; i += 128) prefetch_l2(row + i);
}

template <class T, int QkDim, class Map, bool Quantised>
__device__ __forceinline__ void load_tiles_tokens(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  TilePlace<Map> place;
  const int row = TokenWarps<Map>::first_row() + TokenWarps<Map>::lane() % TokenWarps<Map>::kRows;
  for_each_row_block<Map>(p, [&](int item, const RowBlock& range) {
    int tile = range.tile_begin;
    if (tile < range.tile_end && place.count % 2 != TokenWarps<Map>::half()) ++tile, place.advance();
    int now = look_up(p, range, tile, row), next = look_up(p, range, tile + 2, row);
#pragma unroll 1
    for (; tile < load_row_block<Map>(p, item).tile_end; tile += 2) {
      const RowBlock r = load_row_block<Map>(p, item);
      const int later = look_up(p, r, tile + 4, row);
      if (Quantised || Map::kRows != 16) {
        const FmKvCache& kv = p.kv[TilePositions(p, r, tile + 2).cache];
        prefetch_row(kv, place_of(kv, next, tile + 2, row), r.kv_head);
      }
      const FmKvCache& kv = p.kv[TilePositions(p, r, tile).cache];
      load_tile<T, QkDim, Map, Quantised>(kv, r.kv_head, place_of(kv, now, tile, row), smem, control, place);
      now = next, next = later;
      place.advance();
      if (tile + 1 < load_row_block<Map>(p, item).tile_end) place.advance();
    }
  });
}

}  // namespace fm
