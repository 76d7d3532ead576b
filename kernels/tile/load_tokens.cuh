// The token loader: warps fetch single rows and place the swizzle by hand. For any page size, for caches of single
// tokens by index (sparse attention), for any 16-byte aligned strides, and for quantised caches.
//
// Half of the warps take the even tiles, half the odd ones. Where a page or an index points is looked up two of a warp's
// tiles ahead, over the ends of items, and the rows of its next tile are called to the L2. Rows of 16-bit numbers are
// copied in 16-byte pieces by cp.async, whose arrivals nobody waits for here. Of quantised rows a lane fetches 16 codes
// into registers, a batch of rows at a time, and stores them as 16-bit numbers; the next batch is under way while a
// place is waited for.
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
  static constexpr int kArrivals = kOfTile * 32;       // for a block: one of each lane
  static constexpr int kRows = kTileTokens / kOfTile;  // of a warp; a lane knows one
  static_assert(kRows <= 32);

  static __device__ __forceinline__ int thread() { return block_thread() - (FM_DECODE_THREADS - 128); }
  static __device__ __forceinline__ int lane() { return block_thread() % 32; }
  static __device__ __forceinline__ int half() { return thread() / (kThreads / 2); }
  static __device__ __forceinline__ int row() { return first_row() + lane() % kRows; }  // this lane's
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

// The tiles of a warp, one after another through the items of the worker, and what was looked up for this lane's token.
template <class Map>
struct TileCursor {
  static constexpr int kDone = 0x7FFFFFFF;
  int item;       // kDone after the last tile
  int tile, end;  // of the item's tiles
  int cache;      // which one the tile is in
  int found;      // what the block table or the list of indices says; -1 where there is nothing

  __device__ __forceinline__ bool done() const { return item == kDone; }

  // To the warp's first tile.
  __device__ __forceinline__ void begin(const FmDecodeParams& p) {
    item = first_worker_item<Map>(p) - 1;
    tile = TokenWarps<Map>::half();
    enter_next(p);
  }
  // To its next tile.
  __device__ __forceinline__ void advance(const FmDecodeParams& p) {
    if (done()) return;
    tile += 2;
    if (tile < end) {
      look_up(p, load_row_block<Map>(p, item));
      return;
    }
    tile -= end;
    enter_next(p);
  }
  // To tile `tile` of what follows this item.
  __device__ __forceinline__ void enter_next(const FmDecodeParams& p) {
    const int last = next_worker_item<Map>(p);
    found = -1, cache = 0;
    while (++item < last) {
      const RowBlock r = load_row_block<Map>(p, item);
      if (!Map::kSplits && r.row_begin >= r.rows && p.multicast == 1) continue;
      const int tiles = max(r.tile_end - r.tile_begin, 0);
      if (tile >= tiles) {
        tile -= tiles;
        continue;
      }
      tile += r.tile_begin, end = r.tile_end;
      look_up(p, r);
      return;
    }
    item = kDone;
  }
  __device__ __forceinline__ void look_up(const FmDecodeParams& p, const RowBlock& r) {
    const TilePositions tokens(p, r, tile);
    const FmKvCache& kv = p.kv[tokens.cache];
    const int position = tokens.first + TokenWarps<Map>::row();
    cache = tokens.cache, found = -1;
    if (position >= tokens.end) return;
    if (kv.indices != nullptr) {
      found = load_once(kv.indices + r.request * kv.indices_stride[0] + r.q_begin * kv.indices_stride[1] + position);
    } else {
      const int column = kv.page_shift >= 0 ? position >> kv.page_shift : position / kv.page_size;
      if (column < p.max_pages) found = load_once(p.block_table + r.request * p.block_table_stride + column);
    }
  }
  // Where the token is.
  __device__ __forceinline__ TokenPlace place(const FmDecodeParams& p) const {
    const FmKvCache& kv = p.kv[cache];
    if (found < 0) return {-1, 0};
    const bool sparse = kv.indices != nullptr;
    const int of = sparse ? found : tile * kTileTokens + TokenWarps<Map>::row();
    int page = found, offset;
    if (kv.page_shift >= 0) {
      if (sparse) page = found >> kv.page_shift;
      offset = of & (kv.page_size - 1);
    } else {
      if (sparse) page = found / kv.page_size;
      offset = of % kv.page_size;
    }
    return {page < kv.num_pages ? page : -1, offset};
  }
};

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
#pragma unroll 4
  for (int i = lane / 8; i < TokenWarps<Map>::kRows; i += 4)
    copy_piece(to_row(TokenWarps<Map>::first_row() + i, lane % 8), shuffle(own, i), at + lane % 8 * 16, any);
}

// Leaves the scale of a row's group, and the quotient by which scores are scaled (scores.cuh): by whole warps, of which
// four neighbouring lanes have the groups of a row. For the quotients, scales that add nothing to a sum of float32
// products are as if a little larger: they stay in range.
template <class Map>
__device__ __forceinline__ void leave_scale(float scale, int row, int group, bool store, uint32_t smem,
                                            TilePlace<Map> place) {
  const uint32_t to = smem + Map::scale_offset(place.rope()) + (group * kTileTokens + row) * 4;
  if (store) store_shared(to, scale);
  if constexpr (Map::kScaleRows > Map::kScaleGroups) {
    float top = fmaxf(fabsf(scale), __shfl_xor_sync(~0u, fabsf(scale), 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float least = fmaxf(top * 0x1p-60f, 0x1p-120f), own = fabsf(scale) < least ? least : scale;
    const float next = __shfl_down_sync(~0u, own, 1);
    if (store) store_shared(to + Map::kScaleGroups * kTileTokens * 4, group < 3 ? __fdividef(own, next) : own);
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
#pragma unroll 8
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
  if constexpr (Map::kScaleGroups > 1) {  // numbers without scales may stand beside tiles of codes with scales
#pragma unroll
    for (int i = lane / 4; i < TokenWarps<Map>::kRows; i += 8)
      leave_scale<Map>(1.f, first_row + i, lane % 4, true, smem, place);
  }
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
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
__device__ __forceinline__ uint2 load_codes_8(const uint8_t* at) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_word(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_byte(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}

// A tile's quantised rows as this warp sees them: where this lane's row is, and how the format is read. Absent rows are
// read as if they were the cache's first (loads that depend on nothing need not be waited for), and stored as zeros.
struct CodedRows {
  uint32_t row;      // in units of 16 bytes from the cache's beginning
  int scales;        // from the row's beginning
  uint32_t present;  // bit i: row i of the warp is there
  int cache;

  __device__ __forceinline__ bool own_present() const { return present >> block_thread() % 32 & 1; }
  __device__ __forceinline__ const uint8_t* address(const FmDecodeParams& p, uint32_t there) const {
    return reinterpret_cast<const uint8_t*>(p.kv[cache].rows) + (uint64_t)there * 16;
  }

  // How many lanes share a scale byte, as a shift; below 0: no scale bytes.
  static __device__ __forceinline__ int lane_scale(int format) {
    if (format == FM_KV_FP8_V4) return 2;
    if (format == FM_KV_FP4_V41) return 0;
    return format >= FM_KV_FP8_V41 ? 1 : -1;
  }
  static __device__ __forceinline__ bool has_codes(int format, int lane) { return format != FM_KV_FP8_V4 || lane < 28; }
};

// Rows on their way: a lane has sixteen columns of each, with their scale, and a piece of what else a row has.
template <class T, int QkDim, class Map>
struct RowBatch {
  static constexpr int kRows = Map::kRows == kTileRows && QkDim > kLatent ? 8 : 4;
  static constexpr bool kByteScales = QkDim == kLatent && std::is_same<T, __nv_bfloat16>::value;
  static constexpr bool kGroups = Map::kScaleGroups > 1;
  // Whether the rope part is codes as well; kRopeLanes lanes to a row's.
  static constexpr bool kRopeCodes = QkDim > kLatent && !kGroups;
  static constexpr int kRopeLanes = 4;

  uint4 codes[kRows];
  uint4 rope;              // codes
  uint32_t group_scale;    // float32, of row lane / 4 and its group lane % 4
  uint32_t scale[kByteScales ? kRows : 1];

  __device__ __forceinline__ void load(const FmDecodeParams& p, const CodedRows& rows, int first) {
    const int format = p.kv[rows.cache].format, lane = TokenWarps<Map>::lane(), shift = kByteScales ? CodedRows::lane_scale(format) : -1;
    const int at = kByteScales && !CodedRows::has_codes(format, lane) ? 0 : lane * 16;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* row = rows.address(p, __shfl_sync(~0u, rows.row, first + i));
      if (kByteScales) {
        const int scales = __shfl_sync(~0u, rows.scales, first + i);
        if (shift >= 0) scale[i] = load_byte(row + scales + (lane >> max(shift, 0)));
        if (format == FM_KV_FP4_V41) {
          const uint2 half = load_codes_8(row + lane * 8);
          codes[i].x = half.x, codes[i].y = half.y;
          continue;
        }
      }
      codes[i] = load_codes(row + at);
    }
    if constexpr (QkDim > kLatent) {
      if (kRopeCodes)
        rope = load_codes(rows.address(p, __shfl_sync(~0u, rows.row, first + rope_row() % kRows)) + 512 +
                          lane % kRopeLanes * 16);
      if (kGroups)
        group_scale = load_word(rows.address(p, __shfl_sync(~0u, rows.row, first + lane / 4 % kRows)) + 512 + lane % 4 * 4);
    }
  }

  __device__ __forceinline__ void store(const FmDecodeParams& p, const CodedRows& rows, int first, uint32_t smem,
                                        TilePlace<Map> place) const {
    const int format = p.kv[rows.cache].format;
    const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row() + first;
    const bool has_codes = !kByteScales || CodedRows::has_codes(format, lane);
    // Lanes of odd chunks store their second piece first: the eight lanes of a phase then use all banks. Rows are at
    // multiples of kRows: row i of the batch differs in the low bits only.
    const bool odd = lane & 4;
    const uint32_t to = smem + block_offset(place.block(lane / 8)) + latent_swizzled(first_row, lane * 2 % 16 + odd);
    const auto put = [&](int i, const Values16& v) {
      const uint32_t row_at = (to ^ (i % 8 << 4)) + i * kChunkRowBytes;
      store_shared_if(has_codes, row_at, v.piece[0]);
      store_shared_if(has_codes, row_at ^ 16, v.piece[1]);
    };
    const auto turned = [&](int i) {  // the codes of the piece that is stored first, then the other's
      const uint4 c = codes[i];
      return odd ? make_uint4(c.z, c.w, c.x, c.y) : c;
    };
    const bool e2m1 = kByteScales && format == FM_KV_FP4_V41;
    const bool care = needs_care(rows, format, first);
    if (care) {
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) put(i, careful_values(rows, format, i, first, odd));
    } else if (e2m1) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        put(i, e2m1_values(odd ? make_uint2(codes[i].y, codes[i].x) : make_uint2(codes[i].x, codes[i].y), scale_of(i)));
    } else if (kByteScales && format != FM_KV_FP8) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) put(i, e4m3_values(T(), turned(i), unit_of_scale(scale_of(i))));
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) put(i, e4m3_values(T(), turned(i), kE4m3Unit));
    }
    if constexpr (QkDim > kLatent) {
      if (kRopeCodes && rope_row() < kRows) {
        const uint4 v = rows.present >> (first + rope_row()) & 1 ? rope : make_uint4(0, 0, 0, 0);
        const uint32_t at = smem + Map::rope_offset(place.rope()) + swizzled(first_row + rope_row(), lane % kRopeLanes * 2);
        const Values16 numbers = care ? e4m3_values_and_nan(T(), v) : e4m3_values(T(), v, kE4m3Unit);
        store_shared(at, numbers.piece[0]);
        store_shared(at ^ 16, numbers.piece[1]);
      }
      if constexpr (kGroups) {
        const bool present = rows.present >> (first + lane / 4 % kRows) & 1;
        leave_scale<Map>(present ? __uint_as_float(group_scale) : 0.f, first_row + lane / 4 % kRows, lane % 4,
                         lane / 4 < kRows, smem, place);
      }
    }
  }

 private:
  static __device__ __forceinline__ int rope_row() { return TokenWarps<Map>::lane() / kRopeLanes; }
  __device__ __forceinline__ uint32_t scale_of(int i) const { return scale[kByteScales ? i : 0]; }
  // Whether some row is absent, some code NaN or some scale beyond kMostScale: in the whole batch, so that the usual way
  // has no branches.
  __device__ __forceinline__ bool needs_care(const CodedRows& rows, int format, int first) const {
    constexpr uint32_t kAll = (1u << kRows) - 1;
    bool care = (rows.present >> first & kAll) != kAll;
    if (kByteScales && format == FM_KV_FP4_V41) return care;
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        nan |= nan_bits(codes[i]);
        if (kByteScales) care |= CodedRows::lane_scale(format) >= 0 && scale[i] > kMostScale;
      }
      if (kRopeCodes) nan |= nan_bits(rope);
      care |= (nan & 0x80808080u) != 0;
    }
    return care;
  }
  // Row `which`, its pieces in the order of their stores.
  __device__ __forceinline__ Values16 careful_values(const CodedRows& rows, int format, int which, int first, bool odd) const {
    uint4 c = codes[0];
    uint32_t exponent = scale_of(0);
#pragma unroll
    for (int i = 1; i < kRows; ++i)
      if (i == which) c = codes[i], exponent = scale_of(i);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    Values16 v = {{zero, zero}};
    if (rows.present >> (first + which) & 1) {
      const bool scaled = kByteScales && CodedRows::lane_scale(format) >= 0;
      if (kByteScales && format == FM_KV_FP4_V41) {
        if constexpr (kByteScales) v = e2m1_values(make_uint2(c.x, c.y), exponent);
      } else if constexpr (std::is_same<T, __nv_bfloat16>::value) {
        v = e4m3_values_with_nan(c, scaled ? unit_of_scale(exponent) : kE4m3Unit);
        if (scaled && exponent > kMostScale) v = scale_on(v, exponent);
      } else {
        v = e4m3_values(T(), c, 0);
      }
    }
    if (odd) {
      const uint4 second = v.piece[0];
      v.piece[0] = v.piece[1], v.piece[1] = second;
    }
    return v;
  }
};

// The columns that a quantised row has in bfloat16: 64 of them, `at` bytes into the row. Copied where T is bfloat16:
// then the copies are still to be waited for.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void copy_plain_columns(const FmDecodeParams& p, const CodedRows& rows, uint32_t smem,
                                                   TilePlace<Map> place) {
  const uint8_t* own = rows.own_present() ? rows.address(p, rows.row) : nullptr;
  if constexpr (QkDim == kLatent) {
    if (p.kv[rows.cache].format != FM_KV_FP8_V4) return;
    const uint32_t to = smem + block_offset(place.block(3));  // the last of the 512
    copy_chunk<Map>(own, 448, p.kv[rows.cache].rows,
                    [&](int row, int piece) { return to + latent_swizzled(row, 8 + piece); });
    cp_async_commit();
  } else if constexpr (Map::kScaleGroups > 1) {
    const uint32_t to = smem + Map::rope_offset(place.rope());
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      copy_chunk<Map>(own, 528, p.kv[rows.cache].rows, [&](int row, int piece) { return to + swizzled(row, piece); });
      cp_async_commit();
    } else {
      const int lane = TokenWarps<Map>::lane();
#pragma unroll 1
      for (int i = lane / 8; i < TokenWarps<Map>::kRows; i += 4) {
        const uint8_t* row = shuffle(own, i);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row != nullptr) v = load_codes(row + 528 + lane % 8 * 16);
        v = make_uint4(bf16_to_fp16(v.x), bf16_to_fp16(v.y), bf16_to_fp16(v.z), bf16_to_fp16(v.w));
        store_shared(to + swizzled(TokenWarps<Map>::first_row() + i, lane % 8), v);
      }
    }
  }
}

// ---- tiles ----

// Waits for the tile's places, and says which of this warp's tokens are there.
template <class Map>
__device__ __forceinline__ void take_places(DecodeControl& control, TilePlace<Map> place, bool here) {
  constexpr int kRows = TokenWarps<Map>::kRows;
  using OfFew = typename std::conditional<kRows == 16, uint16_t, uint8_t>::type;
  using Bits = typename std::conditional<kRows == 32, uint32_t, OfFew>::type;  // of a warp's rows
  mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
  const uint32_t present = __ballot_sync(~0u, here);
  if (TokenWarps<Map>::lane() == 0)
    reinterpret_cast<Bits*>(&control.present[place.rope()])[TokenWarps<Map>::first_row() / kRows] = (Bits)present;
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i)
    mbarrier_wait(shared_address(&control.block_empty[place.block(i)]), place.block_parity(i) ^ 1);
}

// Calls arrive(barrier) for the tile and each of its blocks.
template <class Map, class Arrive>
__device__ __forceinline__ void publish_tile(DecodeControl& control, TilePlace<Map> place, Arrive arrive) {
  arrive(shared_address(&control.tile_full[place.rope()]));
#pragma unroll 1
  for (int i = 0; i < kTileBlocks; ++i) arrive(shared_address(&control.block_full[place.block(i)]));
}

template <int QkDim, class Map>
__device__ __forceinline__ void copy_tile(const FmDecodeParams& p, const TileCursor<Map>& at, uint32_t smem,
                                          DecodeControl& control, TilePlace<Map> place) {
  const TokenPlace token = at.place(p);
  take_places<Map>(control, place, token.page >= 0);
  copy_rows<QkDim, Map>(p.kv[at.cache], load_row_block<Map>(p, at.item).kv_head, token, smem, place);
  publish_tile<Map>(control, place, [](uint32_t barrier) { arrive_when_copied(barrier); });
}

// A warp's way through its tiles of 16-bit numbers.
template <int QkDim, class Map>
__device__ __forceinline__ void copy_tiles(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  TilePlace<Map> place;
  place.count = TokenWarps<Map>::half();
  TileCursor<Map> now, next;
  now.begin(p);
  next = now;
#pragma unroll 1
  while (!now.done()) {
    next.advance(p);
    copy_tile<QkDim, Map>(p, now, smem, control, place);
    now = next;
    place.advance(), place.advance();
  }
}

// Where a tile's rows are, if they are codes; of 16-bit rows the format only.
template <int QkDim, class Map>
__device__ __forceinline__ CodedRows coded_rows(const FmDecodeParams& p, const TileCursor<Map>& at) {
  const FmKvCache& kv = p.kv[at.cache];
  CodedRows rows = {0, 0, 0, at.cache};
  const TokenPlace token = at.place(p);
  const bool present = !at.done() && kv.format > FM_KV_FP16 && token.page >= 0;
  if (present) {
    rows.row = (token.page * kv.row_stride[0] + token.offset * kv.row_stride[1]) / 16;
    if (QkDim == kLatent) rows.scales = scales_after(kv, token.offset);
  }
  rows.present = __ballot_sync(~0u, present);
  return rows;
}

// A warp's way through its tiles where they may be of codes. The next batch of rows is asked for as soon as the registers
// of the last one are free, and is under way while places are waited for.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void convert_tiles(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  using Batch = RowBatch<T, QkDim, Map>;
  TilePlace<Map> place;
  place.count = TokenWarps<Map>::half();
  TileCursor<Map> now, next;
  now.begin(p);
  next = now;
  next.advance(p);
  CodedRows rows = coded_rows<QkDim, Map>(p, now);
  Batch batch;
  batch.load(p, rows, 0);
#pragma unroll 1
  while (!now.done()) {
    if (p.kv[rows.cache].format <= FM_KV_FP16) {
      copy_tile<QkDim, Map>(p, now, smem, control, place);
      rows = coded_rows<QkDim, Map>(p, next);
      batch.load(p, rows, 0);
    } else {
      take_places<Map>(control, place, rows.own_present());
      copy_plain_columns<T, QkDim, Map>(p, rows, smem, place);
#pragma unroll 1
      for (int first = 0; first < TokenWarps<Map>::kRows; first += Batch::kRows) {
        batch.store(p, rows, first, smem, place);
        const bool last = first + Batch::kRows == TokenWarps<Map>::kRows;
        if (last) rows = coded_rows<QkDim, Map>(p, next);
        batch.load(p, rows, last ? 0 : first + Batch::kRows);
      }
      cp_async_wait<0>();
      fence_async_shared();
      publish_tile<Map>(control, place, [](uint32_t barrier) { arrive_for_warp<32>(barrier); });
    }
    now = next;
    next.advance(p);
    place.advance(), place.advance();
  }
}

template <class T, int QkDim, class Map, bool Quantised>
__device__ __forceinline__ void load_tiles_tokens(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  if constexpr (Quantised)
    convert_tiles<T, QkDim, Map>(p, smem, control);
  else
    copy_tiles<QkDim, Map>(p, smem, control);
}

}  // namespace fm
