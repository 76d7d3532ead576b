// Combine: the parts of split units, partial results to output.
//
// A split unit's part j holds normalised rows o_j and their base-2 log-sum-exps l_j. With m = max_j l_j,
// out = sum_j 2^(l_j - m) o_j / sum_j 2^(l_j - m) and lse = ln 2 (m + log2 sum_j 2^(l_j - m)). The attention sink
// is applied here, once. Parts are added in a fixed order: the result does not depend on timing.
//
// Blocks walk over (split unit, rows). Four warps cover a row's 512 columns, four per thread. Where units have few
// parts a block takes four rows; where they have many, four groups of threads share the parts of one row. Either way
// the parts are added in four interleaved sums, which are then added in order, so that a row's result depends on its
// own parts only.
#include "ptx/control.cuh"
#include "ptx/math.cuh"
#include "tile/shared_map.cuh"

namespace fm {

constexpr int kSums = 4;       // interleaved sums per row
constexpr int kFewParts = 16;  // up to this mean number of parts a thread adds all four sums of its columns
static_assert(FM_COMBINE_THREADS == kSums * 128, "four rows, or four sums of one row, of 128 threads each");

struct RowWeights {
  float top, sum;  // base-2: maximum, and sum of 2^(l_j - top)
};

__device__ __forceinline__ float load_lse(const float* lse, int64_t stride, int part, int parts) {
  return part < parts ? lse[part * stride] : -__builtin_huge_valf();
}

// Of one row, by a whole warp.
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

// Adds parts first, first + step, ... to the interleaved sums they belong to (part j to sum j % kSums, counted from
// `first`). Four loads are in flight at a time. A part without keys has weight zero and is not read.
template <int Sums>
__device__ __forceinline__ void sum_parts(float4 (&sums)[Sums], const float* out, int64_t stride, const float* lse,
                                          int64_t lse_stride, int first, int step, int parts, float top) {
  constexpr int kBatch = 4;
  static_assert(kBatch % Sums == 0, "a batch begins with the first sum");
  for (int base = first; base < parts; base += kBatch * step) {
    // Lane i of the warp has the weight of the batch's part i.
    const int own = base + threadIdx.x % kBatch * step;
    const float weight = exp2f(load_lse(lse, lse_stride, own, parts) - top);
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (__shfl_sync(~0u, weight, i) != 0.f)
        v[i] = __ldcs(reinterpret_cast<const float4*>(out + (base + i * step) * stride));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __shfl_sync(~0u, weight, i);
      if (w != 0.f) add_scaled(sums[i % Sums], w, v[i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void write_row(const FmCombineParams& p, const FmMerge& m, int block_row, int column,
                                          RowWeights w, float4 sum) {
  const int row = m.row_begin + block_row, token = row / p.group, head = m.kv_head * p.group + row % p.group;
  const float lse = w.sum == 0.f ? -__builtin_huge_valf() : (w.top + log2f(w.sum)) * kLn2;
  float factor = w.sum == 0.f ? 0.f : p.value_scale / w.sum;
  if (p.attn_sink != nullptr && w.sum != 0.f) factor /= 1.f + __expf(p.attn_sink[head] - lse);
  T* out = reinterpret_cast<T*>(p.out) + m.request * p.out_stride[0] +
           (int64_t)(m.q_begin + token) * p.out_stride[1] + head * p.out_stride[2] + column;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack_result(T(), sum.x * factor, sum.y * factor),
                                              pack_result(T(), sum.z * factor, sum.w * factor));
  if (column == 0)
    p.lse[m.request * p.lse_stride[0] + (int64_t)(m.q_begin + token) * p.lse_stride[1] + head * p.lse_stride[2]] = lse;
}

// Rows: how many rows the block combines at once, 4 (a thread adds all sums of its row) or 1 (the groups share it).
template <class T, int Rows>
__device__ __forceinline__ void combine_rows(const FmCombineParams& p, const FmMerge& m, int first_row) {
  __shared__ float4 shares[kSums][128];
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128, column = thread * 4;
  const int block_row = first_row + (Rows == 1 ? 0 : group);
  const bool present = m.row_begin + block_row < m.q_len * p.group;
  const int64_t first = (int64_t)m.first_slot * p.unit_rows + block_row, stride = (int64_t)p.unit_rows * kLatent;
  const float *lse = p.partial_lse + first, *out = p.partial_out + first * kLatent + column;
  if (!present) return;  // all or none of the block's threads when they share a row
  const RowWeights w = row_weights(lse, p.unit_rows, m.parts);
  float4 sum[kSums] = {};
  if (Rows == 1) {
    float4 own[1] = {};
    sum_parts(own, out, stride, lse, p.unit_rows, group, kSums, m.parts, w.top);
    shares[group][thread] = own[0];
    __syncthreads();
    for (int i = 0; i < kSums; ++i) sum[i] = shares[i][thread];
    __syncthreads();
    if (group > 0) return;
  } else {
    sum_parts(sum, out, stride, lse, p.unit_rows, 0, 1, m.parts, w.top);
  }
#pragma unroll
  for (int i = 1; i < kSums; ++i) add_scaled(sum[0], 1.f, sum[i]);
  write_row<T>(p, m, block_row, column, w, sum[0]);
}

template <class T, int Rows>
__device__ __forceinline__ void combine_all(const FmCombineParams& p, int merges) {
  const int tasks = p.unit_rows / Rows;  // per merge; unit_rows is a multiple of 64
  for (int64_t i = blockIdx.x; i < (int64_t)merges * tasks; i += gridDim.x)
    combine_rows<T, Rows>(p, p.merges[i / tasks], i % tasks * Rows);
}

template <class T>
__device__ __forceinline__ void combine(const FmCombineParams& p) {
  wait_for_previous();
  const FmPlanHeader& header = *p.plan;
  if (header.merges == 0) return;
  if (header.slots <= header.merges * kFewParts)
    combine_all<T, 4>(p, header.merges);
  else
    combine_all<T, 1>(p, header.merges);
}

}  // namespace fm

#define FM_COMBINE_KERNEL(NAME, TYPE)                                                              \
  extern "C" __global__ void __launch_bounds__(FM_COMBINE_THREADS, 2)                               \
      NAME(const __grid_constant__ FmCombineParams params) {                                       \
    fm::combine<TYPE>(params);                                                                     \
  }
FM_COMBINE_KERNEL(fm_combine_bf16, __nv_bfloat16)
FM_COMBINE_KERNEL(fm_combine_fp16, __half)
