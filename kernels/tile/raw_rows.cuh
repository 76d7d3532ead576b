// The loader of raw rows. Of its four warps two ask for rows, 32 of each tile: for boxes of whole pages by tensor map where
// there is one, else for each row by a bulk copy. Two prepare what has come: what rows count in, scales relative to that,
// and then, since it is multiplied last, the part of a row that is not codes as it will be multiplied (rest_full); rows that
// are absent become zeros.
//
// fp8 and fp8_v32 (576 columns); fp8, fp8_v4, fp8_v41 and fp8_v41_split (512). Bare rows are of fp8 alone.
#pragma once
#include "../ptx/copy.cuh"
#include "../ptx/shared.cuh"
#include "load_tokens.cuh"
#include "raw_map.cuh"

namespace fm {

constexpr int kPreparingWarps = 2;

// By one thread.
template <class Control>
__device__ __forceinline__ void init_raw_barriers(Control& control) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) mbarrier_init(shared_address(&control.landed[i][h]), 1 + 32);
}

// Bytes of a row that one copy brings.
template <class Map>
__device__ __forceinline__ uint32_t raw_bytes(int format) {
  if (Map::kHasRope) return format == FM_KV_FP8 ? 576 : 656;
  return format == FM_KV_FP8_V4 ? 576 : format == FM_KV_FP8_V41 ? 528 : 512;
}

// Scales that lie apart from their row, to the row.
template <class Map>
__device__ __forceinline__ void ask_for_scales(int format, uint32_t to, const uint8_t* scales) {
  if (format == FM_KV_FP8_V4)
    cp_async_8(to + Map::kScalesAfterPlain, scales);
  else if (format == FM_KV_FP8_V41_SPLIT)
    cp_async_16(to + Map::kScales, scales);
}

// By an asking warp: tile after tile. Where whole boxes of a page can be had, by tensor map, they are; else single rows. The two
// CTAs of a cluster ask for half of them each: a warp of each for its boxes, half of each warp's lanes for rows.
template <int QkDim, class Map, class Control>
__device__ __forceinline__ void ask_for_rows(const FmDecodeParams& p, const CUtensorMap* rows_map, uint32_t smem,
                                             Control& control) {
  const int warp = TokenWarps<Map>::warp(), lane = TokenWarps<Map>::lane();
  const bool shared = !Map::kSplits && p.multicast > 1;
  constexpr uint16_t kBoth = 3;
  TilePlace<Map> place;
  TileCursor<Map> cursor;
  cursor.begin(p);
#pragma unroll 1
  while (!cursor.done()) {
    const FmKvCache& kv = p.kv[cursor.cache];
    const TokenPlace token = cursor.place(p);
    cursor.advance(p);
    const int at = place.rope(), format = kv.format;
    // The compiler sees by the shuffles that these are the same for all lanes, which copies have their turns with.
    const uint32_t barrier = __shfl_sync(~0u, shared_address(&control.landed[at][warp]), 0);
    const uint32_t to = Map::row(smem, at, 32 * warp + lane);
    const uint32_t present = __ballot_sync(~0u, token.page >= 0);
    mbarrier_wait(shared_address(&control.tile_empty[at]), place.rope_parity() ^ 1);
    if (lane == 0) {
      reinterpret_cast<uint32_t*>(&control.present[at])[warp] = present;
      control.format[at] = format;
    }
    if (p.box_shift >= 0) {
      const int rows = 1 << p.box_shift;  // of a warp's 32
      const bool first = lane % rows == 0 && token.page >= 0;
      const int boxes = __popc(__ballot_sync(~0u, first));
      if (lane == 0) mbarrier_arrive_expect(barrier, boxes * rows * Map::kRowBytes);
      __syncwarp();
      if (!shared) {
        if (first) tma_load_3d(to, rows_map, barrier, 0, token.offset, token.page);
      } else if (warp == (int)cluster_rank()) {
        if (first) tma_multicast_3d(to, rows_map, barrier, kBoth, 0, token.offset, token.page);
      }
    } else {
      const uint32_t bytes = __shfl_sync(~0u, raw_bytes<Map>(Map::kBare ? FM_KV_FP8 : format), 0);
      if (lane == 0) mbarrier_arrive_expect(barrier, __popc(present) * bytes);
      __syncwarp();
      if (token.page >= 0) {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(kv.rows) + token.page * kv.row_stride[0] +
                              token.offset * kv.row_stride[1];
        if (!shared)
          bulk_load(to, from, bytes, barrier);
        else if (lane / 16 == (int)cluster_rank())
          bulk_multicast(to, from, bytes, barrier, kBoth);
        if (!Map::kHasRope && !Map::kBare) ask_for_scales<Map>(format, to, from + scales_after(kv, token.offset));
      }
    }
    arrive_when_copied(barrier);
    place.advance();
  }
}

// A lane's row when it has come: what it counts in, its scales, what of it is not codes.
template <class Map>
struct RowPreparation {
  uint32_t row, scales;  // shared addresses
  int token;
  bool present;

  __device__ __forceinline__ void leave_unit(float unit) const {
    store_shared(scales + offsetof(typename Map::Scales, unit) + token * 4, present ? unit : 0.f);
  }
  // Group `group`'s scale, a half in the low bits.
  __device__ __forceinline__ void leave_of_column(int group, uint32_t half) const {
    const uint32_t of_column = scales + offsetof(typename Map::Scales, of_column);
    store_shared_bytes<2>(of_column + (group * kTileTokens + lane_token(token)) * 2, present ? half : 0);
  }
  // Words of two halves of groups.
  __device__ __forceinline__ void leave_of_token(int word, uint32_t halves) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(scales + token * Map::kGroups * 2 + word * 4), "r"(halves) : "memory");
  }
  __device__ __forceinline__ void leave_ones() const {
    leave_unit(1.f);
    if constexpr (!Map::kBare) {
#pragma unroll 4
      for (int i = 0; i < Map::kGroups; ++i) leave_of_column(i, 0x3C00);
#pragma unroll 4
      for (int i = 0; i < Map::kGroups / 2; ++i) leave_of_token(i, 0x3C003C00u);
    }
  }

  // Rows of 576: their scales and unit; returns whether scales are more than powers of two.
  __device__ __forceinline__ bool prepare_scales(int format, RowUnit& unit) const {
    if (format == FM_KV_FP8) {
      leave_ones();
      return false;
    }
    const uint4 v = load_shared_4(row + Map::kFloatScales);
    const uint32_t scale[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0, fractions = 0, power[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, scale[i] & 0x7F800000u), fractions |= scale[i] & 0x7FFFFFu;
    unit = RowUnit(RowUnit::of_largest_code(largest));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float whole = __uint_as_float(scale[i]) * unit.inverse();
      power[i] = __float_as_uint(__uint_as_float(scale[i] & 0xFF800000u) * unit.inverse());
      leave_of_column(i, pack(__half(), whole, whole));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      leave_of_token(i, pack(__half(), __uint_as_float(power[2 * i]), __uint_as_float(power[2 * i + 1])));
    leave_unit(unit.unit());
    return present && fractions != 0;
  }
  // Their rope part. T: of Q.
  template <class T>
  __device__ __forceinline__ void prepare_rope(int format, RowUnit unit) const {
    if (format == FM_KV_FP8) {
      uint4 codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = load_shared_4(row + 512 + 16 * i);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_shared(row + Map::kRope + 32 * i, half_to(T(), e4m3_to_half(codes[i].x, codes[i].y)));
        store_shared(row + Map::kRope + 32 * i + 16, half_to(T(), e4m3_to_half(codes[i].z, codes[i].w)));
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 8; i += 4) {  // four pieces under way
      uint4 piece[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) piece[j] = load_shared_4(row + Map::kRope + 16 * (i + j));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        store_shared(row + Map::kRope + 16 * (i + j), rope_as(T(), piece[j], unit.inverse_pair()));
    }
  }

  // Rows of 512: their scales and unit.
  __device__ __forceinline__ void prepare_latent(int format, RowUnit& unit) const {
    if (format == FM_KV_FP8) {
      leave_ones();
      return;
    }
    const bool plain = format == FM_KV_FP8_V4;
    uint32_t bytes[4] = {0, 0, 0, 0}, largest = 0;
    if (plain) {
      const float2 v = load_shared_2(row + Map::kScalesAfterPlain);
      const uint32_t low = __float_as_uint(v.x), high = __float_as_uint(v.y) & 0xFFFFFF;
      bytes[0] = __byte_perm(low, 0, 0x1100), bytes[1] = __byte_perm(low, 0, 0x3322);
      bytes[2] = __byte_perm(high, 0, 0x1100), bytes[3] = __byte_perm(high, 0, 0x3322);
#pragma unroll 1
      for (int i = 0; i < 8; i += 4) {
        uint4 piece[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) piece[j] = load_shared_4(row + Map::kPlain + 16 * (i + j));
#pragma unroll
        for (int j = 0; j < 4; ++j) largest = max(largest, largest_bf16(piece[j]));
      }
    } else {
      const uint4 v = load_shared_4(row + Map::kScales);
      bytes[0] = v.x, bytes[1] = v.y, bytes[2] = v.z, bytes[3] = v.w;
    }
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (!plain || i < 14) top = max(top, bytes[i / 4] >> i % 4 * 8 & 0xFF);
    largest = max(largest, RowUnit::of_largest_code(ue8m0_bits(top) & 0x7F800000u));
    unit = RowUnit(largest);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto scale = [&](int j) {
        return __uint_as_float(ue8m0_bits(bytes[j / 4] >> j % 4 * 8 & 0xFF)) * unit.inverse();
      };
      const uint32_t pair = pack(__half(), scale(2 * i), scale(2 * i + 1));
      leave_of_token(i, pair);
      leave_of_column(2 * i, pair & 0xFFFF), leave_of_column(2 * i + 1, pair >> 16);
    }
    leave_unit(unit.unit());
  }
  // Their last columns, where these are not codes.
  __device__ __forceinline__ void prepare_plain(RowUnit unit) const {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = row + Map::kPlain + 32 * i;
      uint4 a = load_shared_4(at), b = load_shared_4(at + 16);
      a = bf16_to_half(a, unit.inverse_pair()), b = bf16_to_half(b, unit.inverse_pair());
      store_shared(at, make_uint4(__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410),
                                  __byte_perm(b.x, b.y, 0x5410), __byte_perm(b.z, b.w, 0x5410)));
      store_shared(at + 16, make_uint4(__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632),
                                       __byte_perm(b.x, b.y, 0x7632), __byte_perm(b.z, b.w, 0x7632)));
    }
  }
};

// The tiles of this CTA's worker.
template <class Map>
__device__ __forceinline__ int count_tiles(const FmDecodeParams& p) {
  int tiles = 0;
  for_each_row_block<Map>(p, [&](int, const RowBlock& r) { tiles += max(r.tile_end - r.tile_begin, 0); });
  return tiles;
}

// By a preparing warp.
template <class T, class Map, class Control>
__device__ __forceinline__ void prepare_rows(const FmDecodeParams& p, uint32_t smem, Control& control) {
  const int warp = TokenWarps<Map>::warp(), lane = TokenWarps<Map>::lane();
  TilePlace<Map> place;
#pragma unroll 1
  for (int tiles = count_tiles<Map>(p); tiles > 0; --tiles) {
    const int at = place.rope();
    mbarrier_wait(shared_address(&control.landed[at][warp]), place.rope_parity());
    const int format = Map::kBare ? FM_KV_FP8 : control.format[at], token = 32 * warp + lane;
    const bool present = reinterpret_cast<const uint32_t*>(&control.present[at])[warp] >> lane & 1;
    if (!present) {
#pragma unroll 1
      for (uint32_t i = 0; i < Map::kRowBytes; i += 16)
        store_shared(Map::row(smem, at, token) + i, make_uint4(0, 0, 0, 0));
    }
    const RowPreparation<Map> row = {Map::row(smem, at, token), Map::scales(smem, at), token, present};
    RowUnit unit(0);
    if constexpr (Map::kHasRope) {
      const bool scaled = __any_sync(~0u, row.prepare_scales(format, unit));
      if (!Map::kBare && lane == 0) control.scaled[at][warp] = scaled;
      arrive_once_per_warp(shared_address(&control.tile_full[at]));
      row.template prepare_rope<T>(format, unit);
    } else {
      row.prepare_latent(format, unit);
      if constexpr (!Map::kHasRest) fence_async_shared();
      arrive_once_per_warp(shared_address(&control.tile_full[at]));
      if (format == FM_KV_FP8_V4) row.prepare_plain(unit);
    }
    if constexpr (Map::kHasRest) {
      fence_async_shared();  // before the next copies to the place
      arrive_once_per_warp(shared_address(&control.rest_full(at)));
    }
    place.advance();
  }
}

template <class T, int QkDim, class Map, class Control>
__device__ __forceinline__ void load_raw_tiles(const FmDecodeParams& p, const CUtensorMap* rows_map, uint32_t smem,
                                               Control& control) {
  if (TokenWarps<Map>::thread() < 64)
    ask_for_rows<QkDim, Map>(p, rows_map, smem, control);
  else
    prepare_rows<T, Map>(p, smem, control);
}

}  // namespace fm
