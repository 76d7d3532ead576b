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
  int item, tile, found;

  __device__ __forceinline__ RowBlock row_block(const FmDecodeParams& p) const { return load_row_block<Map>(p, item); }
  __device__ __forceinline__ bool done(const FmDecodeParams& p) const { return item >= next_worker_item<Map>(p); }

  // To the warp's first tile.
  __device__ __forceinline__ void begin(const FmDecodeParams& p) {
    item = first_worker_item<Map>(p) - 1;
    tile = TokenWarps<Map>::half();
    enter_next(p);
  }
  // To its next tile.
  __device__ __forceinline__ void advance(const FmDecodeParams& p) {
    if (done(p)) return;
    const int end = row_block(p).tile_end;
    tile += 2;
    if (tile < end) {
      look_up(p, row_block(p));
      return;
    }
    tile -= end;
    enter_next(p);
  }
  // To tile `tile` of what follows this item.
  __device__ __forceinline__ void enter_next(const FmDecodeParams& p) {
    found = -1;
    while (++item < next_worker_item<Map>(p)) {
      const RowBlock r = row_block(p);
      if (!Map::kSplits && r.row_begin >= r.rows && p.multicast == 1) continue;
      const int tiles = max(r.tile_end - r.tile_begin, 0);
      if (tile >= tiles) {
        tile -= tiles;
        continue;
      }
      tile += r.tile_begin;
      look_up(p, r);
      return;
    }
  }
  // What the block table or the list of indices says of this lane's token; -1 where there is none.
  __device__ __forceinline__ void look_up(const FmDecodeParams& p, const RowBlock& r) {
    const TilePositions tokens(p, r, tile);
    const FmKvCache& kv = p.kv[tokens.cache];
    const int position = tokens.first + TokenWarps<Map>::row();
    found = -1;
    if (position >= tokens.end) return;
    if (kv.indices != nullptr) {
      found = load_once(kv.indices + r.request * kv.indices_stride[0] + r.q_begin * kv.indices_stride[1] + position);
    } else {
      const int column = position / kv.page_size;
      if (column < p.max_pages) found = load_once(p.block_table + r.request * p.block_table_stride + column);
    }
  }
  // Where the token is.
  __device__ __forceinline__ TokenPlace place(const FmKvCache& kv) const {
    if (found < 0) return {-1, 0};
    const bool sparse = kv.indices != nullptr;
    const int page = sparse ? found / kv.page_size : found;
    return {page < kv.num_pages ? page : -1, (sparse ? found : tile * kTileTokens + TokenWarps<Map>::row()) % kv.page_size};
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
__device__ __forceinline__ uint2 load_codes_8(const uint8_t* at) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_byte(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}

// Sixteen columns of a row, from column 16 x lane on. Lanes of odd chunks store their second piece first: the eight
// lanes of a phase then use all banks.
__device__ __forceinline__ void store_values(const Values16& v, uint32_t block, int row, int lane) {
  const bool odd = lane & 4;
  const uint32_t to = block + latent_swizzled(row, lane * 2 % 16 + odd);
  store_shared(to, odd ? v.piece[1] : v.piece[0]);
  store_shared(to ^ 16, odd ? v.piece[0] : v.piece[1]);
}

// A tile's quantised rows as this warp sees them: where this lane's row is, and how the format is read.
struct CodedRows {
  static constexpr uint32_t kAbsent = ~0u;
  uint32_t row;       // in units of 16 bytes from the cache's beginning
  int scales;         // from the row's beginning
  int cache, format;

  // Where row `i` of the warp is; null: absent.
  __device__ __forceinline__ const uint8_t* at(const FmDecodeParams& p, int i) const {
    return address(p, __shfl_sync(~0u, row, i));
  }
  __device__ __forceinline__ const uint8_t* address(const FmDecodeParams& p, uint32_t there) const {
    return there == kAbsent ? nullptr : reinterpret_cast<const uint8_t*>(p.kv[cache].rows) + (uint64_t)there * 16;
  }

  // How many lanes share a scale byte, as a shift; below 0: no scale bytes.
  __device__ __forceinline__ int lane_scale() const {
    if (format == FM_KV_FP8_V4) return 2;
    if (format == FM_KV_FP4_V41) return 0;
    return format >= FM_KV_FP8_V41 ? 1 : -1;
  }
  __device__ __forceinline__ bool has_codes(int lane) const { return format != FM_KV_FP8_V4 || lane < 28; }
};

// Rows on their way: a lane has sixteen columns of each, with their scale, and a piece of what else a row has.
template <class T, int QkDim, class Map>
struct RowBatch {
  static constexpr int kRows = Map::kRows == kTileRows && QkDim > kLatent && Map::kScaleGroups == 1 ? 8 : 4;
  static constexpr bool kByteScales = QkDim == kLatent && std::is_same<T, __nv_bfloat16>::value;
  static constexpr bool kGroups = Map::kScaleGroups > 1;
  // The rope part in bfloat16, or (FP8 with rows of 576) as codes: so many lanes to a row's.
  static constexpr int kRopeLanes = QkDim > kLatent && !kGroups ? 4 : 8;
  static constexpr int kRopeSteps = kRows * kRopeLanes > 32 ? kRows * kRopeLanes / 32 : 1;

  uint4 codes[kRows];
  uint4 rope[kRopeSteps];  // rows of 576 only
  uint4 groups;  // float32 scales of this lane's row
  uint32_t scale[kByteScales ? kRows : 1];

  __device__ __forceinline__ void load(const FmDecodeParams& p, const CodedRows& rows, int first) {
    const int lane = threadIdx.x % 32, shift = kByteScales ? rows.lane_scale() : -1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* row = rows.at(p, first + i);
      codes[i] = make_uint4(0, 0, 0, 0);
      if (kByteScales) {
        const int scales = __shfl_sync(~0u, rows.scales, first + i);
        scale[i] = 0;
        if (row == nullptr || !rows.has_codes(lane)) continue;
        if (shift >= 0) scale[i] = load_byte(row + scales + (lane >> max(shift, 0)));
        if (rows.format == FM_KV_FP4_V41) {
          const uint2 half = load_codes_8(row + lane * 8);
          codes[i].x = half.x, codes[i].y = half.y;
          continue;
        }
      }
      if (row != nullptr) codes[i] = load_codes(row + lane * 16);
    }
    if (QkDim == kLatent) return;
    const int at = kGroups ? 528 : 512;
#pragma unroll
    for (int i = 0; i < kRopeSteps; ++i) {
      const uint8_t* row = rows.at(p, first + rope_row(i));
      rope[i] = make_uint4(0, 0, 0, 0);
      if (row != nullptr && rope_row(i) < kRows) rope[i] = load_codes(row + at + lane % kRopeLanes * 16);
    }
    if (kGroups) {
      groups = make_uint4(0, 0, 0, 0);
      if (rows.row != CodedRows::kAbsent && owns_row(first)) groups = load_codes(rows.address(p, rows.row) + 512);
    }
  }

  __device__ __forceinline__ void store(const CodedRows& rows, int first, uint32_t smem, TilePlace<Map> place) const {
    const int lane = threadIdx.x % 32, first_row = TokenWarps<Map>::first_row() + first;
    const uint32_t block = smem + block_offset(place.block(lane / 8));
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (QkDim > kLatent || rows.has_codes(lane)) store_values(values(rows, i), block, first_row + i, lane);
    if (QkDim == kLatent) return;
#pragma unroll
    for (int i = 0; i < kRopeSteps; ++i)
      if (rope_row(i) < kRows) store_rope(rope[i], first_row + rope_row(i), lane % kRopeLanes, smem, place);
    if (kGroups && owns_row(first))
      leave_scales<Map>(make_float4(__uint_as_float(groups.x), __uint_as_float(groups.y), __uint_as_float(groups.z),
                                    __uint_as_float(groups.w)),
                        TokenWarps<Map>::row(), smem, place);
  }

 private:
  static __device__ __forceinline__ int rope_row(int i) { return (i * 32 + (int)threadIdx.x % 32) / kRopeLanes; }
  // Whether this lane's own row is in the batch.
  static __device__ __forceinline__ bool owns_row(int first) {
    return (unsigned)(threadIdx.x % 32 - first) < (unsigned)kRows;
  }
  __device__ __forceinline__ Values16 values(const CodedRows& rows, int i) const {
    if constexpr (kByteScales) {
      if (rows.format == FM_KV_FP4_V41) return e2m1_values(make_uint2(codes[i].x, codes[i].y), scale[i]);
      if (rows.format != FM_KV_FP8) {
        const Values16 v = e4m3_values(T(), codes[i], unit_of_scale(scale[i]));
        return scale[i] > kMostScale ? scale_on(v, scale[i]) : v;
      }
    }
    return e4m3_values(T(), codes[i], kE4m3Unit);
  }
  static __device__ __forceinline__ void store_rope(uint4 v, int row, int piece, uint32_t smem, TilePlace<Map> place) {
    const uint32_t to = smem + Map::rope_offset(place.rope());
    if (kRopeLanes == 4) {
      const Values16 numbers = e4m3_values(T(), v, kE4m3Unit);
      store_shared(to + swizzled(row, piece * 2), numbers.piece[0]);
      store_shared(to + swizzled(row, piece * 2 + 1), numbers.piece[1]);
    } else {
      if (!std::is_same<T, __nv_bfloat16>::value)
        v = make_uint4(bf16_to_fp16(v.x), bf16_to_fp16(v.y), bf16_to_fp16(v.z), bf16_to_fp16(v.w));
      store_shared(to + swizzled(row, piece), v);
    }
  }
};

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
  const RowBlock r = at.row_block(p);
  const FmKvCache& kv = p.kv[TilePositions(p, r, at.tile).cache];
  const TokenPlace token = at.place(kv);
  take_places<Map>(control, place, token.page >= 0);
  copy_rows<QkDim, Map>(kv, r.kv_head, token, smem, place);
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
  while (!now.done(p)) {
    next.advance(p);
    copy_tile<QkDim, Map>(p, now, smem, control, place);
    now = next;
    place.advance(), place.advance();
  }
}

// Where a tile's rows are, if they are codes; of 16-bit rows the format only.
template <int QkDim, class Map>
__device__ __forceinline__ CodedRows coded_rows(const FmDecodeParams& p, const TileCursor<Map>& at) {
  CodedRows rows = {CodedRows::kAbsent, 0, 0, FM_KV_FP8};
  if (at.done(p)) return rows;
  rows.cache = TilePositions(p, at.row_block(p), at.tile).cache;
  const FmKvCache& kv = p.kv[rows.cache];
  rows.format = kv.format;
  const TokenPlace token = at.place(kv);
  if (kv.format <= FM_KV_FP16 || token.page < 0) return rows;
  rows.row = (token.page * kv.row_stride[0] + token.offset * kv.row_stride[1]) / 16;
  if (QkDim == kLatent) rows.scales = scales_after(kv, token.offset);
  return rows;
}

// A warp's way through its tiles where they may be of codes. While a batch of rows is turned into 16-bit numbers and
// stored, the next one is not under way (registers are short): it is asked for right after that.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void convert_tiles(const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  constexpr int kArrivals = 32;
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
  while (!now.done(p)) {
    if (rows.format <= FM_KV_FP16) {
      copy_tile<QkDim, Map>(p, now, smem, control, place);
      rows = coded_rows<QkDim, Map>(p, next);
      batch.load(p, rows, 0);
    } else {
      take_places<Map>(control, place, rows.row != CodedRows::kAbsent);
      const bool copies = QkDim == kLatent && rows.format == FM_KV_FP8_V4;
      if (copies) {  // the last 64 columns, in bfloat16
        const uint32_t to = smem + block_offset(place.block(3));
        copy_chunk<Map>(rows.address(p, rows.row), 448, p.kv[rows.cache].rows,
                        [&](int row, int piece) { return to + latent_swizzled(row, 8 + piece); });
        cp_async_commit();
      }
#pragma unroll 1
      for (int first = 0; first < TokenWarps<Map>::kRows; first += Batch::kRows) {
        batch.store(rows, first, smem, place);
        const bool last = first + Batch::kRows == TokenWarps<Map>::kRows;
        if (last) rows = coded_rows<QkDim, Map>(p, next);
        batch.load(p, rows, last ? 0 : first + Batch::kRows);
      }
      if (copies) cp_async_wait<0>();
      fence_async_shared();
      publish_tile<Map>(control, place, [](uint32_t barrier) { arrive_for_warp<kArrivals>(barrier); });
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
