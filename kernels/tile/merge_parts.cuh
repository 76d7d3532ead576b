// The merge inside a cluster whose CTAs have shared the tiles of an item: each CTA gets an equal share of the rows from
// all of them, through distributed shared memory, and finishes these. 16 rows at a time.
//
// CTA j holds unnormalised rows o_j with references m_j and sums l_j of its softmax. With m = max_j m_j,
// out = sum_j 2^(m_j - m) o_j / sum_j 2^(m_j - m) l_j. Parts are added in the order of the CTAs.
#pragma once
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "few_scores.cuh"
#include "work.cuh"

namespace fm {

// o[m][FewLayout::value(c, h)]: row FewLayout::row(c), column 64 m + 16 warp + lane / 4 + 8 h of the warpgroup's half.
template <int Rows>
using FewAccumulators = float[4][Rows / 2];

// Arrives at a barrier of every CTA of the cluster, for the whole warp.
__device__ __forceinline__ void arrive_at_all(const uint64_t& barrier, int ctas, int lane) {
  __syncwarp();
  if (lane < ctas) mbarrier_arrive_release_cluster(cluster_address(shared_address(&barrier), lane));
}

// Rows of 16 that each CTA finishes, as a power of two.
__device__ __forceinline__ int share_log2(const FmDecodeParams& p) { return 4 - (31 - __clz(p.splits)); }

// Sends rows first .. first + 16 to the CTAs that finish them.
template <class Map>
__device__ __forceinline__ void send_parts(const FewAccumulators<Map::kRows>& o, int first, int half, uint32_t smem,
                                           FewControl& control, int share) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32, rank = cluster_rank();
  const int column = half * 256 + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    if (c / 4 != first / kPartRows) continue;  // four columns of a thread lie in 16 rows
    const int row = Layout::row(c, lane) - first, own = row & ((1 << share) - 1);
    const uint32_t to = cluster_address(smem + Map::kPartOffset, row >> share) +
                        (((rank << share) + own) * kLatent + column) * 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      store_cluster(to + 256 * m, o[m][Layout::value(c, 0)]);
      store_cluster(to + 256 * m + 32, o[m][Layout::value(c, 1)]);
    }
  }
  if (half == 0 && thread < kPartRows) {
    const uint32_t here = shared_address(&control.part_state[rank][first + thread]);
    store_cluster(cluster_address(here, thread >> share), control.row_state[first + thread]);
  }
}

// Finishes this CTA's share of rows first .. first + 16; a warp takes 128 columns of a row at a time.
template <class T, class Map>
__device__ __forceinline__ void finish_parts(const FmDecodeParams& p, const RowBlock& r, int first, int thread,
                                             const float* parts, const FewControl& control, int share) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int i = thread / 32; i < 4 << share; i += 8) {
    const int own = i / 4, column = i % 4 * 128 + lane * 4, block_row = first + (cluster_rank() << share) + own;
    const float2 state = lane < p.splits ? control.part_state[lane][block_row] : make_float2(kNegInf, 0.f);
    float top = state.x;
#pragma unroll
    for (int d = 1; d < kMostSplits; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    top = __shfl_sync(~0u, top, 0);
    if (top == kNegInf) top = 0.f;
    const float weight = exp2_approx(state.x - top);
    float sum = 0.f;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < kMostSplits; ++j) {
      if (j >= p.splits) break;
      const float w = __shfl_sync(~0u, weight, j);
      const float4 v = *reinterpret_cast<const float4*>(parts + ((j << share) + own) * kLatent + column);
      sum += w * __shfl_sync(~0u, state.y, j);
      total.x += w * v.x, total.y += w * v.y, total.z += w * v.z, total.w += w * v.w;
    }
    if (r.row_begin + block_row >= r.rows) continue;
    const float factor = row_factor<Map>(p, r, block_row, top, sum, column == 0);
    total.x *= factor, total.y *= factor, total.z *= factor, total.w *= factor;
    if (r.slot >= 0) {
      *reinterpret_cast<float4*>(p.partial_out + slot_row<Map>(p, r, block_row) * kLatent + column) = total;
    } else {
      T* out = reinterpret_cast<T*>(p.out) + row_offset(p, r, r.row_begin + block_row, p.out_stride) + column;
      *reinterpret_cast<uint2*>(out) =
          make_uint2(pack_result(T(), total.x, total.y), pack_result(T(), total.z, total.w));
    }
  }
}

// By both values warpgroups of every CTA of the cluster.
template <class T, class Map>
__device__ __forceinline__ void merge_parts(const FmDecodeParams& p, const RowBlock& r,
                                            const FewAccumulators<Map::kRows>& o, int half, uint32_t smem,
                                            FewControl& control, uint32_t& parity) {
  const int thread = half * 128 + warpgroup_thread(), lane = thread % 32;
  const int share = share_log2(p);
  const float* parts = reinterpret_cast<const float*>(__cvta_shared_to_generic(smem + Map::kPartOffset));
#pragma unroll
  for (int first = 0; first < Map::kRows; first += kPartRows) {
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parity ^ 1);
    send_parts<Map>(o, first, half, smem, control, share);
    arrive_at_all(control.parts_full, p.splits, lane);
    if (first + kPartRows == Map::kRows) arrive_once_per_warp(shared_address(&control.result_empty));
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_full), parity);
    finish_parts<T, Map>(p, r, first, thread, parts, control, share);
    arrive_at_all(control.parts_empty, p.splits, lane);
    parity ^= 1;
  }
}

}  // namespace fm
