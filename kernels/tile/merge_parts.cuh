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

// Sends rows first .. first + 16 to the CTAs that finish them.
template <class Map>
__device__ __forceinline__ void send_parts(const FewAccumulators<Map::kRows>& o, int first, int half, uint32_t smem,
                                           FewControl& control, int splits) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32, share = kPartRows / splits, rank = cluster_rank();
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const int row = Layout::row(c, lane) - first;
    if (c / 4 != first / kPartRows) continue;  // four columns of a thread lie in 16 rows
    const int column = half * 256 + thread / 32 * 16 + lane / 4;
    const uint32_t to = cluster_address(smem + Map::kPartOffset, row / share) +
                        ((rank * share + row % share) * kLatent + column) * 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      store_cluster(to + 256 * m, o[m][Layout::value(c, 0)]);
      store_cluster(to + 256 * m + 32, o[m][Layout::value(c, 1)]);
    }
  }
  if (half == 0 && thread < kPartRows) {
    const uint32_t here = shared_address(&control.part_state[rank][first + thread]);
    store_cluster(cluster_address(here, thread / share), control.row_state[first + thread]);
  }
}

// Finishes this CTA's share of rows first .. first + 16; each thread a stretch of four columns at a time.
template <class T, class Map>
__device__ __forceinline__ void finish_parts(const FmDecodeParams& p, const RowBlock& r, int first, int thread,
                                             const float* parts, const FewControl& control) {
  const int share = kPartRows / p.splits;
#pragma unroll 1
  for (int i = thread; i < share * (kLatent / 4); i += 256) {
    const int own = i / (kLatent / 4), column = i % (kLatent / 4) * 4, block_row = first + cluster_rank() * share + own;
    float top = kNegInf, sum = 0.f;
    for (int j = 0; j < p.splits; ++j) top = fmaxf(top, control.part_state[j][block_row].x);
    if (top == kNegInf) top = 0.f;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int j = 0; j < p.splits; ++j) {
      const float2 state = control.part_state[j][block_row];
      const float weight = exp2_approx(state.x - top);
      const float4 v = *reinterpret_cast<const float4*>(parts + (j * share + own) * kLatent + column);
      sum += weight * state.y;
      total.x += weight * v.x, total.y += weight * v.y, total.z += weight * v.z, total.w += weight * v.w;
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
  const float* parts = reinterpret_cast<const float*>(__cvta_shared_to_generic(smem + Map::kPartOffset));
#pragma unroll
  for (int first = 0; first < Map::kRows; first += kPartRows) {
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parity ^ 1);
    send_parts<Map>(o, first, half, smem, control, p.splits);
    arrive_at_all(control.parts_full, p.splits, lane);
    if (first + kPartRows == Map::kRows) arrive_once_per_warp(shared_address(&control.result_empty));
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_full), parity);
    finish_parts<T, Map>(p, r, first, thread, parts, control);
    arrive_at_all(control.parts_empty, p.splits, lane);
    parity ^= 1;
  }
}

}  // namespace fm
