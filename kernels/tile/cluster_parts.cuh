// How a CTA's part of 16 rows that its cluster merges (merge_parts.cuh) lies in shared memory, as floats or as halves, and how it is left
// there.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "few_softmax.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"

namespace fm {

// o[m][FewLayout::value(c, h)]: row FewLayout::row(c), column 64 m + 16 warp + lane / 4 + 8 h of the warpgroup's half; of
// raw rows 64 m + 16 warp + 2 (lane / 4) + h.
template <int Rows>
using FewAccumulators = float[4][Rows / 2];
template <class Map>
constexpr int kFewColumnStep = Map::kRaw ? 1 : 8;
template <class Map>
__device__ __forceinline__ int few_column(int h) {
  return warpgroup_thread() % 32 / 4 * (Map::kRaw ? 2 : 1) + kFewColumnStep<Map> * h;
}

// How a part lies in shared memory. Strides from one row to the next are such that there are no bank conflicts.
struct PartOfFloats {  // states are in the control block
  using Numbers = uint4;  // of four columns
  static constexpr bool kHalves = false;
  static constexpr uint32_t kColumnBytes = 4, kStride = kLatent * kColumnBytes + 32;
  static __device__ __forceinline__ Numbers read(uint32_t from) { return load_cluster_4(from); }
  static __device__ __forceinline__ void add(float4& to, float weight, Numbers v) {
    add_scaled(to, weight,
               make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)));
  }
};

// A word has the two numbers that a thread has of a row and a block: of 16-bit caches of columns eight apart, of raw rows of neighbours.
// What a warp has of a row counts in a power of two. Half the bytes, which are what reading them takes long for, and more instructions.
struct PartOfHalves {
  using Numbers = uint2;
  struct State {  // after the row's numbers
    float2 row;               // reference and sum
    uint8_t exponents[2][4];  // of each warp of both warpgroups
  };
  static constexpr bool kHalves = true;
  static constexpr uint32_t kColumnBytes = 2, kState = kLatent * kColumnBytes, kStride = kState + sizeof(State);
  // A row that is kept lies where this CTA's part of it would come to if it were sent.
  static __device__ __forceinline__ int place(int row, int kept) { return row == kept ? kPartRows + row : row; }
  static __device__ __forceinline__ Numbers read(uint32_t from) { return load_cluster_2(from); }
  static __device__ __forceinline__ void add(float4& to, float weight, Numbers v) { add_pairs(to, weight, v.x, weight, v.y); }
};

// Whether parts are sent: where they are many, so that each is short. There is a place for what comes behind the CTA's own part.
template <class Map>
constexpr bool kSends = Map::kCluster == kMostCluster && Map::kRows == kPartRows && !Map::kRaw;
constexpr uint32_t kSentBytes = kPartRows * PartOfHalves::kStride;  // by all, to one CTA
static_assert(2 * kSentBytes <= kPartBytes && kPartRows * PartOfFloats::kStride <= kPartBytes);

// What parts are. Of those that are read where they lie halves take as long as floats, or up to 0.5 us longer, over 16-bit caches, and as long
// of rows with scales (docs/tried-ends.md, "Parts of clusters as halves").
template <class Map, bool kRaw = Map::kRaw>
struct PartOf {
  using Type = std::conditional_t<kSends<Map>, PartOfHalves, PartOfFloats>;
};
template <class Map>
struct PartOf<Map, true> {
  using Type = std::conditional_t<Map::kBare, PartOfHalves, PartOfFloats>;
};

// Leaves what a thread has of rows first .. first + 16. kept: the row, of parts that are sent, that this CTA finishes itself.
template <class Map>
__device__ __forceinline__ void leave_numbers(PartOfFloats, const FewAccumulators<Map::kRows>& o, int first, int half,
                                              uint8_t* part, const FewControl& control, int) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32;
  const int column = half * 256 + thread / 32 * 16 + few_column<Map>(0);
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    if (c / 4 != first / kPartRows) continue;  // four columns of a thread lie in 16 rows
    float* row = reinterpret_cast<float*>(part + (Layout::row(c, lane) - first) * PartOfFloats::kStride) + column;
    const float unit = Map::kCodes && !Map::kRaw ? control.unit[Layout::row(c, lane)] : 1.f;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) row[64 * m + kFewColumnStep<Map> * h] = o[m][Layout::value(c, h)] * unit;
  }
}

template <class Map>
__device__ __forceinline__ void leave_numbers(PartOfHalves, const FewAccumulators<Map::kRows>& o, int first, int half,
                                              uint8_t* part, const FewControl& control, int kept) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32, warp = thread / 32;
  float top[4];  // of the eight numbers of each row, then of the warp's 64
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    if (c / 4 != first / kPartRows) continue;
    top[c % 4] = 0.f;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[c % 4] = fmaxf(top[c % 4], fabsf(o[m][Layout::value(c, h)]));
  }
#pragma unroll
  for (int d = 4; d < 32; d *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], d));
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    if (c / 4 != first / kPartRows) continue;
    uint8_t* row = part + PartOfHalves::place(Layout::row(c, lane) - first, kept) * PartOfHalves::kStride;
    uint32_t* words = reinterpret_cast<uint32_t*>(row) + half * 128 + warp * 8 + lane / 4;
    const float unit = Map::kCodes && !Map::kRaw ? control.unit[Layout::row(c, lane)] : 1.f;
    const uint32_t exponent = HalfScale::exponent(top[c % 4] * unit);
    const float factor = HalfScale::inverse(exponent) * unit;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      words[32 * m] = pack(__half(), o[m][Layout::value(c, 0)] * factor, o[m][Layout::value(c, 1)] * factor);
    if (lane / 4 == c % 4) reinterpret_cast<PartOfHalves::State*>(row + PartOfHalves::kState)->exponents[half][warp] = exponent;
  }
}

template <class Map, class Part>
__device__ __forceinline__ void leave_part(const FewAccumulators<Map::kRows>& o, int first, int half, uint8_t* part,
                                           FewControl& control, int kept) {
  leave_numbers<Map>(Part(), o, first, half, part, control, kept);
  const int thread = warpgroup_thread();
  if (half != 0 || thread >= kPartRows) return;
  if constexpr (Part::kHalves)
    reinterpret_cast<typename Part::State*>(part + Part::place(thread, kept) * Part::kStride + Part::kState)->row =
        control.row_state[first + thread];
  else
    control.part_state[thread] = control.row_state[first + thread];
}

}  // namespace fm
