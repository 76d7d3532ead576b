// merge_states: the exact combination of two partial attentions over disjoint key sets.
//
// With m = max(a, b) of the two natural log-sum-exps, out = (e^(a-m) A + e^(b-m) B) / (e^(a-m) + e^(b-m)) and
// lse = m + ln(e^(a-m) + e^(b-m)). A side that saw no key (lse = -inf) contributes nothing, whatever its row holds.
// One warp per row, grid-stride.
#include "params.h"
#include "ptx/launch.cuh"
#include "tile/numbers.cuh"

namespace fm {

__device__ __forceinline__ int64_t at(const int (&index)[3], const int64_t (&stride)[3]) {
  return index[0] * stride[0] + index[1] * stride[1] + index[2] * stride[2];
}

template <class T>
__device__ __forceinline__ uint32_t merge_pair(uint32_t a, uint32_t b, float wa, float wb) {
  const float2 x = unpack(T(), a), y = unpack(T(), b);
  auto mix = [&](float u, float v) { return (wa == 0.f ? 0.f : wa * u) + (wb == 0.f ? 0.f : wb * v); };
  return pack_result(T(), mix(x.x, y.x), mix(x.y, y.y));
}

template <class T>
__device__ __forceinline__ void merge_row(const FmMergeParams& p, const int (&index)[3]) {
  const int lane = threadIdx.x % 32;
  const float a = p.lse_a[at(index, p.lse_a_stride)], b = p.lse_b[at(index, p.lse_b_stride)];
  const float none = -__builtin_huge_valf();
  float wa = a == none ? 0.f : 1.f, wb = b == none ? 0.f : 1.f, lse = a == none ? b : a;
  if (a != none && b != none) {
    const float top = fmaxf(a, b);  // the other one of a NaN, whose weight is NaN then, and with it all
    const float ea = expf(a - top), eb = expf(b - top), sum = ea + eb;
    wa = ea / sum, wb = eb / sum, lse = top + logf(sum);
  }
  const T* row_a = reinterpret_cast<const T*>(p.out_a) + at(index, p.out_a_stride);
  const T* row_b = reinterpret_cast<const T*>(p.out_b) + at(index, p.out_b_stride);
  T* row = reinterpret_cast<T*>(p.out) + at(index, p.out_stride);
  for (int c = lane * 8; c < FM_LATENT; c += 256) {
    const uint4 x = *reinterpret_cast<const uint4*>(row_a + c), y = *reinterpret_cast<const uint4*>(row_b + c);
    *reinterpret_cast<uint4*>(row + c) = make_uint4(merge_pair<T>(x.x, y.x, wa, wb), merge_pair<T>(x.y, y.y, wa, wb),
                                                    merge_pair<T>(x.z, y.z, wa, wb), merge_pair<T>(x.w, y.w, wa, wb));
  }
  __syncwarp();  // lse may be one of the inputs: every lane has read it
  if (lane == 0) p.lse[at(index, p.lse_stride)] = lse;
}

template <class T>
__device__ __forceinline__ void merge(const FmMergeParams& p) {
  const int64_t rows = (int64_t)p.dim[0] * p.dim[1] * p.dim[2], warps = (int64_t)gridDim.x * (blockDim.x / 32);
  for (int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < rows; i += warps) {
    const int64_t outer = i / p.dim[2];
    const int index[3] = {(int)(outer / p.dim[1]), (int)(outer % p.dim[1]), (int)(i % p.dim[2])};
    merge_row<T>(p, index);
  }
}

}  // namespace fm

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_merge_bf16(const __grid_constant__ FmMergeParams params) {
  fm::follow_earlier_launches();
  fm::merge<__nv_bfloat16>(params);
}
extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_merge_fp16(const __grid_constant__ FmMergeParams params) {
  fm::follow_earlier_launches();
  fm::merge<__half>(params);
}
