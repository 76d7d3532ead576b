// Quantised rows on their way to shared memory: codes in registers, stored as halves. A token's row counts in a power of
// two of its own (RowUnit), which scores and weights are multiplied with.
#pragma once
#include "codes.cuh"
#include "copied_rows.cuh"

namespace fm {

// Where a quantised row's scales begin, in bytes from the row's own beginning.
__device__ __forceinline__ int scales_after(const FmKvCache& kv, int offset) {
  switch (kv.format) {
    case FM_KV_FP8_V4: return (kv.page_size - offset) * 576 + offset * 8;
    case FM_KV_FP8_V41_SPLIT: return (kv.page_size - offset) * 512 + offset * 16;
    case FM_KV_FP4_V41: return 256;
    default: return 512;
  }
}

__device__ __forceinline__ uint4 load_16(const uint8_t* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
__device__ __forceinline__ uint2 load_8(const uint8_t* at) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_4(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_2(const uint8_t* at) {
  uint16_t v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_1(const uint8_t* at) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}

// A tile's rows as this warp sees them: where this lane's row is. Absent rows are read as if they were the cache's first
// (loads that depend on nothing need not be waited for), and stored as zeros.
struct CodedRows {
  uint32_t row;      // in units of 16 bytes from the cache's beginning
  uint32_t other;    // rows of 576: the same of the rope part of 16-bit numbers; of 512: bytes from a row to its scales
  uint32_t present;  // bit i: row i of the warp is there
  int cache;

  __device__ __forceinline__ const uint8_t* address(const FmDecodeParams& p, int which) const {
    return reinterpret_cast<const uint8_t*>(p.kv[cache].rows) + (uint64_t)__shfl_sync(~0u, row, which) * 16;
  }
};

// A float's bits from a UE8M0 scale.
__device__ __forceinline__ uint32_t ue8m0_bits(uint32_t byte) {
  return byte == 0 ? 1u << 22 : byte == 255 ? 0x7FC00000u : byte << 23;
}

// Four rows on their way. A lane has sixteen columns of each; and of row lane / 8, eight columns of the part that has no
// scales, and the scales of an eighth of the columns.
template <int QkDim, class Map>
struct RowBatch {
  static constexpr int kRows = 4;
  static constexpr bool kHasRope = QkDim > kLatent;

  uint4 codes[kRows];
  uint4 plain;      // bfloat16, or e4m3 codes in its first half
  uint32_t scales;  // as they are in memory

  __device__ __forceinline__ void load(const FmDecodeParams& p, const CodedRows& rows, int first) {
    const int format = p.kv[rows.cache].format, lane = TokenWarps<Map>::lane(), eighth = lane % 8;
    if (!kHasRope && format == FM_KV_FP4_V41) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint2 half = load_8(rows.address(p, first + i) + lane * 8);
        codes[i].x = half.x, codes[i].y = half.y;
      }
    } else {
      const int column = has_codes(format, lane) ? lane * 16 : 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) codes[i] = load_16(rows.address(p, first + i) + column);
    }
    const uint8_t* own = rows.address(p, first + lane / 8);
    if constexpr (kHasRope) {
      if (format == FM_KV_FP8) {
        const uint2 v = load_8(own + 512 + eighth * 8);
        plain.x = v.x, plain.y = v.y;
      } else {
        plain = load_16(own + 528 + eighth * 16);
        scales = load_4(own + 512 + eighth / 2 * 4);
      }
    } else {
      const uint8_t* at = own + __shfl_sync(~0u, rows.other, first + lane / 8);
      if (format == FM_KV_FP8_V4) {
        plain = load_16(own + 448 + eighth * 16);
        scales = load_1(at + eighth);
      } else if (format == FM_KV_FP4_V41) {
        scales = load_4(at + eighth * 4);
      } else if (format != FM_KV_FP8) {
        scales = load_2(at + eighth * 2);
      }
    }
  }

  // `present`: the warp's rows.
  __device__ __forceinline__ void store(int format, uint32_t present, int first, uint32_t smem, TilePlace<Map> place) {
    const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row() + first;
    present >>= first;
    if ((present & 15) != 15) clear_absent(present);
    const float unit = store_plain(format, first_row, smem, place);
    if (lane % 8 == 0)
      store_shared(smem + Map::kUnitsOffset + (place.rope() * kTileTokens + first_row + lane / 8) * 4,
                   present >> lane / 8 & 1 ? unit : 0.f);
    // Lanes of odd chunks store their second piece first: the eight lanes of a phase then use all banks. Rows are at
    // multiples of four: row i of the batch differs in the low bits only.
    const bool odd = lane & 4;
    const uint32_t to = smem + block_offset(place.block(lane / 8)) + latent_swizzled(first_row, lane * 2 % 16 + odd);
    const auto put = [&](int i, uint4 a, uint4 b) {
      const uint32_t at = (to ^ (i << 4)) + i * kChunkRowBytes;
      store_shared_if(has_codes(format, lane), at, a);
      store_shared_if(has_codes(format, lane), at ^ 16, b);
    };
    if (!kHasRope && format == FM_KV_FP4_V41) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t four = __shfl_sync(~0u, scales, i * 8 + lane / 4);
        const uint32_t scale = e4m3_to_half(__byte_perm(four, 0, lane % 4 * 0x1111)).x;
        const uint4 c = codes[i];
        put(i, scaled(e2m1_to_half(odd ? c.y : c.x), scale), scaled(e2m1_to_half(odd ? c.x : c.y), scale));
      }
    } else if (format == FM_KV_FP8) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint4 c = turned(i, odd);
        put(i, e4m3_to_half(c.x, c.y), e4m3_to_half(c.z, c.w));
      }
    } else {
      const uint32_t which = lane & 2 ? 0x3232 : 0x1010;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t scale = __byte_perm(__shfl_sync(~0u, scales, i * 8 + lane / 4), 0, which);
        const uint4 c = turned(i, odd);
        put(i, scaled(e4m3_to_half(c.x, c.y), scale), scaled(e4m3_to_half(c.z, c.w), scale));
      }
    }
  }

 private:
  static __device__ __forceinline__ bool has_codes(int format, int lane) {
    return kHasRope || format != FM_KV_FP8_V4 || lane < 28;
  }
  __device__ __forceinline__ uint4 turned(int i, bool odd) const {  // the codes of the piece that is stored first, first
    const uint4 c = codes[i];
    return odd ? make_uint4(c.z, c.w, c.x, c.y) : c;
  }
  __device__ __forceinline__ void clear_absent(uint32_t present) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (!(present >> i & 1)) codes[i] = make_uint4(0, 0, 0, 0);
    if (!(present >> TokenWarps<Map>::lane() / 8 & 1)) plain = make_uint4(0, 0, 0, 0), scales = 0;
  }

  // Settles what row lane / 8 counts in, stores its plain part, and makes `scales` what codes are multiplied with: a
  // pair of halves, for the first and the second half of the lane's eighth (e2m1: left as they are).
  __device__ __forceinline__ float store_plain(int format, int first_row, uint32_t smem, TilePlace<Map> place) {
    const int lane = TokenWarps<Map>::lane(), row = first_row + lane / 8, eighth = lane % 8;
    const uint32_t in_rope = smem + Map::rope_offset(place.rope()) + swizzled(row, eighth);
    if (format == FM_KV_FP8) {
      if (kHasRope) store_shared(in_rope, e4m3_to_half(plain.x, plain.y));
      return 1.f;
    }
    if (!kHasRope && format == FM_KV_FP4_V41) return 1.f;
    const bool has_plain = kHasRope || format == FM_KV_FP8_V4;
    uint32_t first_scale = scales, second_scale = scales;
    if (!kHasRope) {
      first_scale = ue8m0_bits(scales & 0xFF), second_scale = ue8m0_bits(scales >> 8);
      if (format == FM_KV_FP8_V4) {
        if (eighth == 7) first_scale = 0;
        second_scale = first_scale;
      }
    }
    // Codes reach 448, a little less than 2^9.
    uint32_t largest = min(max(first_scale & 0x7FFFFFFFu, second_scale & 0x7FFFFFFFu), 246 * RowUnit::kOne) +
                       8 * RowUnit::kOne;
    if (has_plain) largest = max(largest, largest_bf16(plain));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const RowUnit unit(largest);
    scales = pack(__half(), __uint_as_float(first_scale) * unit.inverse(), __uint_as_float(second_scale) * unit.inverse());
    if (has_plain) {
      const uint32_t in_block = smem + block_offset(place.block(3)) + latent_swizzled(row, 8 + eighth);
      store_shared(kHasRope ? in_rope : in_block, bf16_to_half(plain, unit.inverse()));
    }
    return unit.unit();
  }
};

// Turns this warp's rows, which are in shared memory as they are in a bf16 cache, into halves.
template <int QkDim, class Map>
__device__ __forceinline__ void convert_copied_rows(uint32_t smem, TilePlace<Map> place, uint32_t present, bool bf16) {
  const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row();
  const uint32_t of_units = smem + Map::kUnitsOffset + place.rope() * kTileTokens * 4;
#pragma unroll 1
  for (int i = 0; i < TokenWarps<Map>::kRows; ++i) {
    const int row = first_row + i;
    float unit = 1.f;
    if (bf16) {
      const uint32_t at[3] = {smem + block_offset(place.block(lane / 16)) + latent_swizzled(row, lane % 16),
                              smem + block_offset(place.block(2 + lane / 16)) + latent_swizzled(row, lane % 16),
                              smem + Map::rope_offset(place.rope()) + swizzled(row, lane % 8)};
      const int pieces = QkDim > kLatent && lane < 8 ? 3 : 2;
      uint4 v[3];
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (j < pieces) v[j] = load_shared_4(at[j]), largest = max(largest, largest_bf16(v[j]));
      const RowUnit of_row(__reduce_max_sync(~0u, largest));
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (j < pieces) store_shared(at[j], bf16_to_half(v[j], of_row.inverse()));
      unit = of_row.unit();
    }
    if (lane == 0) store_shared(of_units + row * 4, present >> i & 1 ? unit : 0.f);
  }
}

}  // namespace fm
