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

// Four rows on their way. A lane has eight columns of each half of them; and of row lane / 8, eight columns of the part
// that has no scales, and the scales of an eighth of the columns. T: of Q, and of the rope part in shared memory.
template <class T, int QkDim, class Map>
struct RowBatch {
  static constexpr int kRows = 4;
  static constexpr bool kHasRope = QkDim > kLatent;

  uint2 codes[kRows][2];
  uint4 plain;      // bfloat16, or e4m3 codes in its first half
  uint32_t scales;  // as they are in memory

  __device__ __forceinline__ void load(const FmDecodeParams& p, const CodedRows& rows, int first) {
    const int format = p.kv[rows.cache].format, lane = TokenWarps<Map>::lane(), eighth = lane % 8;
    if (!kHasRope && format == FM_KV_FP4_V41) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint8_t* at = rows.address(p, first + i) + lane * 4;
        codes[i][0].x = load_4(at), codes[i][1].x = load_4(at + 128);
      }
    } else {
      const int second = has_second(format, lane) ? 256 : 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint8_t* at = rows.address(p, first + i) + lane * 8;
        codes[i][0] = load_8(at), codes[i][1] = load_8(at + second);
      }
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

  // `present`: the warp's rows. Returns whether some scale is not a power of two.
  __device__ __forceinline__ bool store(int format, uint32_t present, int first, uint32_t smem, TilePlace<Map> place) {
    const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row() + first;
    present >>= first;
    if ((present & 15) != 15) clear_absent(present);
    bool scaled_rows = false;
    float unit = 1.f;
    if constexpr (kHasRope) {
      store_rope(format, first_row, smem, place);
      if (format != FM_KV_FP8) unit = take_float_scales(first_row, smem, place, scaled_rows);
    } else if (format != FM_KV_FP8 && format != FM_KV_FP4_V41) {
      unit = take_exponents(format, first_row, smem, place);
    }
    if (lane % 8 == 0)
      store_shared(token_unit_at<Map>(smem, place.rope(), first_row + lane / 8), present >> lane / 8 & 1 ? unit : 0.f);
    store_codes(format, first_row, smem, place);
    return scaled_rows;
  }

 private:
  // Not of all formats do the last columns have codes.
  static __device__ __forceinline__ bool has_second(int format, int lane) {
    return kHasRope || format != FM_KV_FP8_V4 || lane < 24;
  }
  __device__ __forceinline__ void clear_absent(uint32_t present) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (!(present >> i & 1)) codes[i][0] = codes[i][1] = make_uint2(0, 0);
    if (!(present >> TokenWarps<Map>::lane() / 8 & 1)) plain = make_uint4(0, 0, 0, 0), scales = 0;
  }

  // The rope part of row lane / 8 as T: it has no unit.
  __device__ __forceinline__ void store_rope(int format, int first_row, uint32_t smem, TilePlace<Map> place) const {
    const int lane = TokenWarps<Map>::lane();
    const uint4 v = format == FM_KV_FP8 ? half_to(T(), e4m3_to_half(plain.x, plain.y)) : bf16_to(T(), plain);
    store_shared(smem + Map::rope_offset(place.rope()) + swizzled(first_row + lane / 8, lane % 8), v);
  }

  // These two make `scales` what codes are multiplied with, powers of two as a pair of halves, for the first and the
  // second half of the lane's eighth; and return what row lane / 8 counts in.

  // Of a float32 scale the power of two: the rest is left beside the tile.
  __device__ __forceinline__ float take_float_scales(int first_row, uint32_t smem, TilePlace<Map> place,
                                                     bool& scaled_rows) {
    const int lane = TokenWarps<Map>::lane(), row = first_row + lane / 8;
    const uint32_t exponent = scales & 0x7F800000u;
    uint32_t largest = exponent;
#pragma unroll
    for (int d = 2; d < 8; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const RowUnit unit(of_largest_code(largest));
    scaled_rows = __any_sync(~0u, (scales & 0x7FFFFFu) != 0);
    // Scales that are infinite or NaN make NaN here. Sign and exponent stay in `scales`.
    const float mantissa = __uint_as_float(scales & 0x7FFFFFFFu) *
                           __uint_as_float(254 * RowUnit::kOne - min(exponent, 254 * RowUnit::kOne));
    if (lane % 2 == 0) store_shared(mantissa_at<Map>(smem, place.rope(), lane % 8 / 2, row), mantissa);
    const float scale = __uint_as_float(scales & 0xFF800000u) * unit.inverse();
    scales = pack(__half(), scale, scale);
    return unit.unit();
  }

  __device__ __forceinline__ float take_exponents(int format, int first_row, uint32_t smem, TilePlace<Map> place) {
    const int lane = TokenWarps<Map>::lane(), eighth = lane % 8;
    uint32_t scale[2] = {ue8m0_bits(scales & 0xFF), ue8m0_bits(scales >> 8)};
    const bool has_rope = format == FM_KV_FP8_V4;
    if (has_rope) scale[1] = scale[0] = eighth == 7 ? 0 : scale[0];
    uint32_t largest = of_largest_code(max(scale[0], scale[1]));
    if (has_rope) largest = max(largest, largest_bf16(plain));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const RowUnit unit(largest);
    scales = pack(__half(), __uint_as_float(scale[0]) * unit.inverse(), __uint_as_float(scale[1]) * unit.inverse());
    if (has_rope)
      store_shared(smem + block_offset(place.block(3)) + latent_swizzled(first_row + lane / 8, 8 + eighth),
                       bf16_to_half(plain, unit.inverse_pair()));
    return unit.unit();
  }
  // Codes reach 448, a little less than 2^9.
  static __device__ __forceinline__ uint32_t of_largest_code(uint32_t scale_bits) {
    return min(scale_bits, 246 * RowUnit::kOne) + 8 * RowUnit::kOne;
  }

  __device__ __forceinline__ void store_codes(int format, int first_row, uint32_t smem, TilePlace<Map> place) const {
    static_assert(Map::kTriple == 0, "the places of a lane's two pieces are four blocks apart");
    const int lane = TokenWarps<Map>::lane();
    const bool second = has_second(format, lane);
    // Rows are at multiples of four: row i of the batch differs in the low bits only.
    const uint32_t to = smem + block_offset(place.block(lane / 16)) + latent_swizzled(first_row, lane % 16);
    const auto put = [&](int i, uint4 a, uint4 b) {
      const uint32_t at = (to ^ (i << 4)) + i * kChunkRowBytes;
      store_shared(at, a);
      store_shared_if(second, at + 4 * kBlockBytes, b);
    };
    const int from = kHasRope ? lane / 16 * 2 : lane / 8;  // the eighth with the lane's first scale; four on the second
    if (!kHasRope && format == FM_KV_FP4_V41) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto scale = [&](int which) {
          const uint32_t four = __shfl_sync(~0u, scales, i * 8 + from + which);
          return e4m3_to_half(__byte_perm(four, 0, lane / 2 % 4 * 0x1111)).x;
        };
        put(i, scaled(e2m1_to_half(codes[i][0].x), scale(0)), scaled(e2m1_to_half(codes[i][1].x), scale(4)));
      }
    } else if (format == FM_KV_FP8) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        put(i, e4m3_to_half(codes[i][0].x, codes[i][0].y), e4m3_to_half(codes[i][1].x, codes[i][1].y));
    } else {
      const uint32_t half = !kHasRope && lane & 4 ? 0x3232 : 0x1010;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto scale = [&](int which) {
          const uint32_t pair = __shfl_sync(~0u, scales, i * 8 + from + which);
          return kHasRope ? pair : __byte_perm(pair, 0, half);
        };
        put(i, scaled(e4m3_to_half(codes[i][0].x, codes[i][0].y), scale(0)),
            scaled(e4m3_to_half(codes[i][1].x, codes[i][1].y), scale(4)));
      }
    }
  }
};

// Whether some scale of this warp's rows is not a power of two.
template <class Map>
__device__ __forceinline__ void leave_scaled(uint32_t smem, TilePlace<Map> place, bool scaled) {
  if (TokenWarps<Map>::lane() == 0)
    store_shared_byte(smem + Map::kUnitsOffset + offsetof(Units, scaled) + place.rope() * 8 + TokenWarps<Map>::warp(),
                      scaled);
}

// Turns this warp's rows, which are in shared memory as they are in a bf16 cache, into halves; not their rope part.
template <class Map>
__device__ __forceinline__ void convert_copied_rows(uint32_t smem, TilePlace<Map> place, uint32_t present, bool bf16) {
  const int lane = TokenWarps<Map>::lane(), first_row = TokenWarps<Map>::first_row();
#pragma unroll 1
  for (int i = 0; i < TokenWarps<Map>::kRows; ++i) {
    const int row = first_row + i;
    float unit = 1.f;
    if (bf16) {
      const uint32_t at = smem + block_offset(place.block(lane / 16)) + latent_swizzled(row, lane % 16);
      const uint4 a = load_shared_4(at), b = load_shared_4(at + 4 * kBlockBytes);
      const RowUnit of_row(__reduce_max_sync(~0u, max(largest_bf16(a), largest_bf16(b))));
      store_shared(at, bf16_to_half(a, of_row.inverse_pair()));
      store_shared(at + 4 * kBlockBytes, bf16_to_half(b, of_row.inverse_pair()));
      unit = of_row.unit();
    }
    if (lane == 0) store_shared(token_unit_at<Map>(smem, place.rope(), row), present >> i & 1 ? unit : 0.f);
  }
}

}  // namespace fm
