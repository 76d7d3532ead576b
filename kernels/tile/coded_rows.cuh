// Quantised rows on their way to shared memory: codes in registers, stored as 16-bit numbers.
#pragma once
#include <type_traits>

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

// A tile's quantised rows as this warp sees them: where this lane's row is. Absent rows are
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
    const int format = p.kv[rows.cache].format, lane = TokenWarps<Map>::lane();
    const int shift = kByteScales ? CodedRows::lane_scale(format) : -1;
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
        group_scale =
            load_word(rows.address(p, __shfl_sync(~0u, rows.row, first + lane / 4 % kRows)) + 512 + lane % 4 * 4);
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
        const uint32_t at =
            smem + Map::rope_offset(place.rope()) + swizzled(first_row + rope_row(), lane % kRopeLanes * 2);
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
  // Whether some row is absent, some code NaN or some scale beyond kMostScale: in the whole batch, so that the usual
  // way has no branches.
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
  __device__ __forceinline__ Values16 careful_values(const CodedRows& rows, int format, int which, int first,
                                                     bool odd) const {
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

// The 64 columns that a quantised row has in bfloat16, if any. Copied where T is bfloat16: then the copies are still to
// be waited for.
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

}  // namespace fm
