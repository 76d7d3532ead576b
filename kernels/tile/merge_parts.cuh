// The merge inside a cluster whose CTAs have shared the tiles of an item: each CTA leaves its part of 16 rows in shared
// memory, and finishes an equal share of them from the parts of all. Where the item is itself a part of a split unit,
// those are partial results, which split_few.cuh adds up.
//
// CTA j holds unnormalised rows o_j with references m_j and sums l_j of its softmax. With m = max_j m_j,
// out = sum_j 2^(m_j - m) o_j / sum_j 2^(m_j - m) l_j. Parts are added in a fixed order.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "few_scores.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "split_few.cuh"
#include "work.cuh"

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

// Arrives at a barrier of every CTA of the cluster, for the whole warp: what it has written to its shared memory can be read then.
__device__ __forceinline__ void arrive_at_all(const uint64_t& barrier, int ctas, int lane) {
  __syncwarp();
  if (lane < ctas) mbarrier_arrive_release_cluster(cluster_address(shared_address(&barrier), lane));
}

// The same after reads only, whose numbers have been used: without waiting for results that are on their way to memory.
__device__ __forceinline__ void arrive_read_at_all(const uint64_t& barrier, int ctas, int lane) {
  __syncwarp();
  if (lane < ctas) mbarrier_arrive_at(shared_address(&barrier), lane);
}

// Leaves rows first .. first + 16 for the cluster to read.
template <class Map>
__device__ __forceinline__ void leave_part(const FewAccumulators<Map::kRows>& o, int first, int half, float* part,
                                           FewControl& control) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32;
  part += half * 256 + thread / 32 * 16 + few_column<Map>(0);
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    if (c / 4 != first / kPartRows) continue;  // four columns of a thread lie in 16 rows
    float* row = part + (Layout::row(c, lane) - first) * kPartStride;
    const float unit = Map::kCodes && !Map::kRaw ? control.unit[Layout::row(c, lane)] : 1.f;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) row[64 * m + kFewColumnStep<Map> * h] = o[m][Layout::value(c, h)] * unit;
  }
  if (half == 0 && thread < kPartRows) control.part_state[thread] = control.row_state[first + thread];
}

// Finishes this CTA's share of rows first .. first + 16, of a cluster of `Splits`: a warp has one row's quarters of columns,
// as many as make eight reads of parts, which are all under way at once; of 16 parts half a quarter, each half of its lanes
// reading eight of them. wait() returns when all parts are there.
template <class T, class Map, int Splits, class Wait>
__device__ __forceinline__ void finish_parts(const FmDecodeParams& p, const RowBlock& r, int first, int thread,
                                             uint32_t part, const FewControl& control, Wait wait) {
  constexpr int kGroups = Splits > 8 ? Splits / 8 : 1, kParts = Splits / kGroups;  // of lanes; that each of them reads
  constexpr int kQuarters = 8 / kParts, kWarps = Splits / 2;                       // of a row: to a warp, and warps
  const int lane = thread % 32, warp = thread / 32, group = lane / (32 / kGroups);
  const int own = cluster_rank() * (kPartRows / Splits) + warp / kWarps, block_row = first + own;
  const int column = warp % kWarps * (1024 / Splits) + lane % (32 / kGroups) * 4;
  const std::conditional_t<Map::kEarlyEnds, EarlyRowEnd<Map>, RowEnd<Map>> end(p, r, block_row);
  if (Map::kEarlyEnds) wait();
  if (!end.exists()) return;  // before any read: all are used before parts are given up
  const float2 state = load_cluster_2(cluster_address(shared_address(&control.part_state[own]), lane % Splits));
  float4 v[kParts][kQuarters];
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const uint32_t from = cluster_address(part + (own * kPartStride + column) * 4, group * kParts + j);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) v[j][i] = load_cluster_4(from + i * 512);
  }
  float top = fmaxf(state.x, -__FLT_MAX__);  // finite: weights of parts without keys are zero, or all sums
#pragma unroll
  for (int d = 1; d < Splits; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float weight = exp2_approx(state.x - top);
  float sum = weight * state.y;
#pragma unroll
  for (int d = 1; d < Splits; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  float4 total[kQuarters] = {};
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float w = __shfl_sync(~0u, weight, group * kParts + j);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) add_scaled(total[i], w, v[j][i]);
  }
  if constexpr (kGroups > 1) {
    static_assert(kGroups == 2);
    const auto both = [](float x) { return x + __shfl_xor_sync(~0u, x, 16); };
#pragma unroll
    for (int i = 0; i < kQuarters; ++i)
      total[i] = make_float4(both(total[i].x), both(total[i].y), both(total[i].z), both(total[i].w));
  }
  const bool stores = group == 0;
  const float factor = row_factor<Map>(p, r, end, top, sum, stores && column == 0);
  if (!stores) return;
  if (r.slot >= 0) {
    float* to = p.partial_out + end.partial_out() + column;
#pragma unroll
    for (int i = 0; i < kQuarters; ++i)
      *reinterpret_cast<float4*>(to + 128 * i) =
          make_float4(total[i].x * factor, total[i].y * factor, total[i].z * factor, total[i].w * factor);
  } else {
    T* to = reinterpret_cast<T*>(p.out) + end.out() + column;
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) store_four(to + 128 * i, total[i], factor);
  }
}

// By both values warpgroups of every CTA of the cluster.
template <class T, class Map>
__device__ __forceinline__ void merge_parts(const FmDecodeParams& p, const RowBlock& r,
                                            const FewAccumulators<Map::kRows>& o, int half, uint32_t smem,
                                            FewControl& control, uint32_t& parity) {
  const int thread = half * 128 + warpgroup_thread(), lane = thread % 32;
  float* part = reinterpret_cast<float*>(__cvta_shared_to_generic(smem + Map::kPartOffset));
#pragma unroll
  for (int first = 0; first < Map::kRows; first += kPartRows) {
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parity ^ 1);
    leave_part<Map>(o, first, half, part, control);
    arrive_at_all(control.parts_full, p.splits, lane);
    if (!Map::kRaw && !Map::kHandsQueryOn && first + kPartRows == Map::kRows)
      arrive_once_per_warp(shared_address(&control.result_empty));
    const auto wait = [&] { mbarrier_wait_acquire_cluster(shared_address(&control.parts_full), parity); };
    if (!Map::kEarlyEnds) wait();
    const uint32_t parts = smem + Map::kPartOffset;
    if (p.splits == 2)
      finish_parts<T, Map, 2>(p, r, first, thread, parts, control, wait);
    else if (p.splits == 4)
      finish_parts<T, Map, 4>(p, r, first, thread, parts, control, wait);
    else if (p.splits == 8)
      finish_parts<T, Map, 8>(p, r, first, thread, parts, control, wait);
    else
      finish_parts<T, Map, 16>(p, r, first, thread, parts, control, wait);
    arrive_read_at_all(control.parts_empty, p.splits, lane);
    parity ^= 1;
  }
  if constexpr (Map::kHandsQueryOn) {  // the next item's Q comes to the same place
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parity ^ 1);
    arrive_once_per_warp(shared_address(&control.result_empty));
  }
}

}  // namespace fm
