// The merge inside a cluster whose CTAs have shared the tiles of an item: each CTA leaves its part of 16 rows in shared
// memory, and finishes an equal share of them from the parts of all, which it reads there, or which are sent to it. Where
// the item is itself a part of a split unit, those are partial results, which split_few.cuh adds up.
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
#include "../ptx/shared.cuh"
#include "cluster_parts.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "split_few.cuh"
#include "work.cuh"

namespace fm {

// Arrives at a barrier of every CTA of the cluster, for the whole warp: what it has written to its shared memory can be read then.
template <class Map>
__device__ __forceinline__ void arrive_at_all(const uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane < Map::kCluster) mbarrier_arrive_release_cluster(cluster_address(shared_address(&barrier), lane));
}

// The same after reads only, whose numbers have been used: without waiting for results that are on their way to memory.
template <class Map>
__device__ __forceinline__ void arrive_read_at_all(const uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane < Map::kCluster) mbarrier_arrive_at(shared_address(&barrier), lane);
}

// Store four numbers of a row, multiplied with `factor`. kApart: of two columns, and of those eight on, in turn, as parts that are sent
// have them, whose units are whole.
template <class T, bool kApart>
__device__ __forceinline__ void store_finished(T* out, float4 v, float factor) {
  if constexpr (!kApart) {
    store_four(out, v, factor);
  } else {
    *reinterpret_cast<uint32_t*>(out) = pack_result(T(), v.x * factor, v.z * factor);
    *reinterpret_cast<uint32_t*>(out + 8) = pack_result(T(), v.y * factor, v.w * factor);
  }
}
__device__ __forceinline__ void store_partial(float* out, float4 v, float factor) {
  *reinterpret_cast<float4*>(out) = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

// Finishes this CTA's share of rows first .. first + 16: a warp has one row's quarters of columns,
// as many as make eight reads of parts, which are all under way at once; of 16 parts half a quarter, each half of its lanes
// reading eight of them. wait() returns when all parts are there.
template <class T, class Map, class Wait>
__device__ __forceinline__ void finish_parts(const FmDecodeParams& p, const RowBlock& r, int first, int thread,
                                             uint32_t part, const FewControl& control, Wait wait) {
  using Part = typename PartOf<Map>::Type;
  constexpr int kCtas = Map::kCluster;
  constexpr bool kSent = kSends<Map>, kHalves = Part::kHalves, kApart = kHalves && !Map::kRaw;
  constexpr bool kEarlyFactor = !Map::kRaw && !kSent;  // while numbers of other CTAs are waited for
  constexpr int kGroups = kCtas > 8 ? kCtas / 8 : 1, kParts = kCtas / kGroups;  // of lanes; that each of them reads
  constexpr int kQuarters = 8 / kParts, kWarps = kCtas / 2;                      // of a row: to a warp, and warps
  constexpr int kSides = kHalves && kQuarters == 4 ? 2 : 1;  // whose exponents a warp needs: of both warpgroups, or of one
  constexpr int kRowsOfCta = kPartRows / kCtas;
  const int lane = thread % 32, warp = thread / 32, group = lane / (32 / kGroups);
  const int own = warp / kWarps, block_row = first + cluster_rank() * kRowsOfCta + own;
  const int column = warp % kWarps * (1024 / kCtas) + lane % (32 / kGroups) * 4;  // in the order of the part
  const std::conditional_t<Map::kEarlyEnds, EarlyRowEnd<Map>, RowEnd<Map>> end(p, r, block_row);
  if (Map::kEarlyEnds) wait();
  if (!end.exists()) return;  // before any read: all are used before parts are given up
  const uint32_t sent = part + kSentBytes + own * Part::kStride, kept = part + (block_row - first) * Part::kStride;
  const auto row = [&](int j) { return kSent ? sent + j * (kRowsOfCta * Part::kStride) : cluster_address(kept, j); };
  uint4 state;  // of part lane % kCtas
  if constexpr (kSent)
    state = load_shared_4(row(lane % kCtas) + Part::kState);
  else if constexpr (kHalves)
    state = load_cluster_4(row(lane % kCtas) + Part::kState);
  else {
    const uint2 v = load_cluster_2(cluster_address(shared_address(&control.part_state[block_row - first]), lane % kCtas));
    state = make_uint4(v.x, v.y, 0, 0);
  }
  typename Part::Numbers v[kParts][kQuarters];
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const uint32_t from = row(group * kParts + j) + column * Part::kColumnBytes;
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const uint32_t at = from + i * (kLatent / 4) * Part::kColumnBytes;
      if constexpr (kSent)
        v[j][i] = load_shared_8(at);
      else
        v[j][i] = Part::read(at);
    }
  }
  const float reference = __uint_as_float(state.x);
  float top = fmaxf(reference, -__FLT_MAX__);  // finite: weights of parts without keys are zero, or all sums
#pragma unroll
  for (int d = 1; d < kCtas; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float weight = exp2_approx(reference - top);
  float sum = weight * __uint_as_float(state.y);
#pragma unroll
  for (int d = 1; d < kCtas; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  const bool stores = group == 0;
  const auto find_factor = [&] { return row_factor<Map>(p, r, end, top, sum, stores && column == 0); };
  float factor = kEarlyFactor ? find_factor() : 0.f;
  const uint32_t exponents[2] = {kSides == 2 || column < kLatent / 2 ? state.z : state.w, state.w};
  float4 total[kQuarters] = {};
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const int from = group * kParts + j;
    float weights[kSides];
#pragma unroll
    for (int k = 0; k < kSides; ++k) {
      weights[k] = __shfl_sync(~0u, weight, from);
      if constexpr (kHalves)  // eight numbers of a block are of one warp
        weights[k] *= HalfScale::scale(__byte_perm(__shfl_sync(~0u, exponents[k], from), 0, lane / 4 % 4 | 0x4440));
    }
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) Part::add(total[i], weights[i * kSides / kQuarters], v[j][i]);
  }
  if constexpr (kGroups > 1) {
    static_assert(kGroups == 2);
    const auto both = [](float x) { return x + __shfl_xor_sync(~0u, x, 16); };
#pragma unroll
    for (int i = 0; i < kQuarters; ++i)
      total[i] = make_float4(both(total[i].x), both(total[i].y), both(total[i].z), both(total[i].w));
  }
  if (!kEarlyFactor) factor = find_factor();
  if (!stores) return;
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const int at = column + kLatent / 4 * i, to = kApart ? at / 16 * 16 + at % 16 / 2 : at;
    if (r.slot >= 0)
      store_partial(p.partial_out + end.partial_out() + at, total[i], factor);
    else
      store_finished<T, kApart>(reinterpret_cast<T*>(p.out) + end.out() + to, total[i], factor);
  }
}

// Sends each other CTA of a cluster of kMostCluster its row, when both values warpgroups have left it.
__device__ __forceinline__ void send_rows(uint32_t part, int thread, uint32_t full) {
  constexpr uint32_t kBytes = kSentBytes / kMostCluster;
  fence_async_shared();
  named_barrier<kAddBarrier, 256>();
  if (thread == 0) mbarrier_arrive_expect(full, kSentBytes - kBytes);
  const int rank = cluster_rank();
  const uint32_t to = uniform(part + kSentBytes + rank * kBytes);
#pragma unroll 1
  for (int i = uniform(thread / 32); i < kMostCluster; i += 8)
    if (i != rank) send_part(to, uniform(part + i * kBytes), kBytes, uniform(full), i);
}

// By both values warpgroups of every CTA of the cluster.
template <class T, class Map>
__device__ __forceinline__ void merge_parts(const FmDecodeParams& p, const RowBlock& r,
                                            const FewAccumulators<Map::kRows>& o, int half, uint32_t smem,
                                            FewControl& control, uint32_t& parity) {
  using Part = typename PartOf<Map>::Type;
  const int thread = half * 128 + warpgroup_thread(), lane = thread % 32;
  const uint32_t part = smem + Map::kPartOffset, full = shared_address(&control.parts_full);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(__cvta_shared_to_generic(part));
#pragma unroll
  for (int first = 0; first < Map::kRows; first += kPartRows) {
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parity ^ 1);
    leave_part<Map, Part>(o, first, half, bytes, control, kSends<Map> ? cluster_rank() : -1);
    if constexpr (kSends<Map>)
      send_rows(part, thread, full);
    else
      arrive_at_all<Map>(control.parts_full, lane);
    if (!Map::kRaw && !Map::kHandsQueryOn && first + kPartRows == Map::kRows)
      arrive_once_per_warp(shared_address(&control.result_empty));
    const auto wait = [&] {
      if constexpr (kSends<Map>)
        mbarrier_wait(full, parity);
      else
        mbarrier_wait_acquire_cluster(full, parity);
    };
    if (!Map::kEarlyEnds) wait();
    finish_parts<T, Map>(p, r, first, thread, part, control, wait);
    arrive_read_at_all<Map>(control.parts_empty, lane);
    parity ^= 1;
  }
  if constexpr (Map::kHandsQueryOn) {  // the next item's Q comes to the same place
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parity ^ 1);
    arrive_once_per_warp(shared_address(&control.result_empty));
  }
}

}  // namespace fm
