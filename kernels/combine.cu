// Combine: the parts of split units, partial results to output.
//
// A split unit's part j holds normalised rows o_j and their base-2 log-sum-exps l_j. With m = max_j l_j,
// out = sum_j 2^(l_j - m) o_j / sum_j 2^(l_j - m) and lse = ln 2 (m + log2 sum_j 2^(l_j - m)). The attention sink
// is applied here, once. Parts are added in a fixed order: the result does not depend on timing.
//
// Blocks walk over (split unit, row); four groups of 128 threads take every fourth part of the row, four columns
// per thread, and add up through shared memory.
#include "ptx/control.cuh"
#include "ptx/math.cuh"
#include "tile/shared_map.cuh"

namespace fm {

constexpr int kGroups = FM_COMBINE_THREADS / 128;

struct RowWeights {
  float top, sum;  // base-2: maximum, and sum of 2^(l_j - top)
};

__device__ __forceinline__ RowWeights row_weights(const float* lse, int64_t stride, int parts) {
  const int lane = threadIdx.x % 32;
  float top = -__builtin_huge_valf();
  for (int j = lane; j < parts; j += 32) top = fmaxf(top, lse[j * stride]);
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (top == -__builtin_huge_valf()) top = 0.f;
  float sum = 0.f;
  for (int j = lane; j < parts; j += 32) sum += exp2f(lse[j * stride] - top);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return {top, sum};
}

__device__ __forceinline__ void add_scaled(float4& to, float weight, float4 v) {
  to.x += weight * v.x, to.y += weight * v.y, to.z += weight * v.z, to.w += weight * v.w;
}

// This group's share of the weighted sum of the parts of one row. A part without keys has weight zero and is not
// read.
__device__ __forceinline__ float4 weighted_parts(const float* out, int64_t stride, const float* lse,
                                                 int64_t lse_stride, int parts, float top) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int j = threadIdx.x / 128; j < parts; j += kGroups) {
    const float weight = exp2f(lse[j * lse_stride] - top);
    if (weight != 0.f) add_scaled(sum, weight, *reinterpret_cast<const float4*>(out + j * stride));
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void combine_row(const FmCombineParams& p, const FmMerge& m, int block_row) {
  __shared__ float4 shares[kGroups - 1][128];
  const int column = threadIdx.x % 128 * 4, group = threadIdx.x / 128;
  const int64_t first = (int64_t)m.first_slot * p.unit_rows + block_row;
  const float* lse = p.partial_lse + first;
  const RowWeights w = row_weights(lse, p.unit_rows, m.parts);
  float4 sum = weighted_parts(p.partial_out + first * kLatent + column, (int64_t)p.unit_rows * kLatent, lse,
                              p.unit_rows, m.parts, w.top);
  if (group > 0) shares[group - 1][threadIdx.x % 128] = sum;
  __syncthreads();
  if (group == 0) {
    for (int g = 0; g < kGroups - 1; ++g) add_scaled(sum, 1.f, shares[g][threadIdx.x]);
    const int row = m.row_begin + block_row, token = row / p.group, head = m.kv_head * p.group + row % p.group;
    const float row_lse = w.sum == 0.f ? -__builtin_huge_valf() : (w.top + log2f(w.sum)) * kLn2;
    float factor = w.sum == 0.f ? 0.f : 1.f / w.sum;
    if (p.attn_sink != nullptr && w.sum != 0.f) factor /= 1.f + __expf(p.attn_sink[head] - row_lse);
    T* out = reinterpret_cast<T*>(p.out) + m.request * p.out_stride[0] +
             (int64_t)(m.q_begin + token) * p.out_stride[1] + head * p.out_stride[2] + column;
    *reinterpret_cast<uint2*>(out) = make_uint2(pack_result(T(), sum.x * factor, sum.y * factor),
                                                pack_result(T(), sum.z * factor, sum.w * factor));
    if (threadIdx.x == 0)
      p.lse[m.request * p.lse_stride[0] + (int64_t)(m.q_begin + token) * p.lse_stride[1] + head * p.lse_stride[2]] =
          row_lse;
  }
  __syncthreads();
}

template <class T>
__device__ __forceinline__ void combine(const FmCombineParams& p) {
  wait_for_previous();
  const int merges = reinterpret_cast<const FmPlanHeader*>(p.plan)->merges;
  const FmMerge* all = reinterpret_cast<const FmMerge*>(p.plan + p.plan_merges);
  for (int64_t i = blockIdx.x; i < (int64_t)merges * p.unit_rows; i += gridDim.x) {
    const FmMerge m = all[i / p.unit_rows];
    const int block_row = i % p.unit_rows;
    if (m.row_begin + block_row < m.q_len * p.group) combine_row<T>(p, m, block_row);
  }
}

}  // namespace fm

#define FM_COMBINE_KERNEL(NAME, TYPE)                                                              \
  extern "C" __global__ void __launch_bounds__(FM_COMBINE_THREADS)                                 \
      NAME(const __grid_constant__ FmCombineParams params) {                                       \
    fm::combine<TYPE>(params);                                                                     \
  }
FM_COMBINE_KERNEL(fm_combine_bf16, __nv_bfloat16)
FM_COMBINE_KERNEL(fm_combine_fp16, __half)
