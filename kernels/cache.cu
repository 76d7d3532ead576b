// Cache operations: append new tokens, gather pages to contiguous rows. One warp per token, grid-stride, 16 bytes
// per lane and step. Row products are 64-bit; a slot, page or id outside the cache is absent: never written, read
// as zeros.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.h"

namespace fm {

__device__ __forceinline__ int64_t warp_index() {
  return (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}
__device__ __forceinline__ int64_t warp_count() { return (int64_t)gridDim.x * (blockDim.x / 32); }

// `elements` 16-bit numbers, a multiple of 8.
__device__ __forceinline__ void copy_row(void* to, const void* from, int elements) {
  for (int i = threadIdx.x % 32; i < elements / 8; i += 32)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

__device__ __forceinline__ uint32_t half_pair_to_bf16(uint32_t v) {
  const float2 f = __half22float2(*reinterpret_cast<__half2*>(&v));
  const __nv_bfloat162 r = __floats2bfloat162_rn(f.x, f.y);
  return *reinterpret_cast<const uint32_t*>(&r);
}

// A cached row, or zeros when `from` is null, to bf16.
__device__ __forceinline__ void gather_row(uint16_t* to, const uint16_t* from, int elements, bool fp16) {
  for (int i = threadIdx.x % 32; i < elements / 8; i += 32) {
    uint4 v = from == nullptr ? make_uint4(0, 0, 0, 0) : reinterpret_cast<const uint4*>(from)[i];
    if (fp16)
      v = make_uint4(half_pair_to_bf16(v.x), half_pair_to_bf16(v.y), half_pair_to_bf16(v.z), half_pair_to_bf16(v.w));
    reinterpret_cast<uint4*>(to)[i] = v;
  }
}

// The physical id (page * page_size + offset) of row `t` of the gathered tokens, or -1.
__device__ __forceinline__ int64_t source_id(const FmGatherParams& p, int64_t t) {
  if (p.block_table == nullptr)
    return p.ids_are_64bit ? reinterpret_cast<const int64_t*>(p.ids)[t * p.ids_stride]
                           : reinterpret_cast<const int32_t*>(p.ids)[t * p.ids_stride];
  int low = 0, high = p.batch;  // the request r with offsets[r] <= t < offsets[r + 1]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.offsets[middle] <= t ? low : high) = middle;
  }
  if (p.batch == 0 || t >= p.offsets[low + 1]) return -1;
  const int64_t position = t - p.offsets[low], column = position / p.page_size;
  if (column >= p.max_pages) return -1;
  const int64_t page = p.block_table[low * p.block_table_stride + column];
  return page < 0 ? -1 : page * p.page_size + position % p.page_size;
}

__device__ __forceinline__ const uint16_t* row_at(const void* base, const int64_t (&stride)[2], int64_t page,
                                                  int64_t offset) {
  return reinterpret_cast<const uint16_t*>(base) + page * stride[0] + offset * stride[1];
}

}  // namespace fm

extern "C" __global__ void __launch_bounds__(256) fm_append(const __grid_constant__ FmAppendParams p) {
  for (int64_t t = fm::warp_index(); t < p.tokens; t += fm::warp_count()) {
    const int64_t slot = p.slots[t * p.slots_stride];
    if (slot < 0 || slot >= p.num_pages * p.page_size) continue;
    const int64_t page = slot / p.page_size, offset = slot % p.page_size;
    fm::copy_row(const_cast<uint16_t*>(fm::row_at(p.cache_nope, p.cache_nope_stride, page, offset)),
                 reinterpret_cast<const uint16_t*>(p.kv_c) + t * p.kv_c_stride, p.nope_dim);
    if (p.rope_dim > 0)
      fm::copy_row(const_cast<uint16_t*>(fm::row_at(p.cache_rope, p.cache_rope_stride, page, offset)),
                   reinterpret_cast<const uint16_t*>(p.k_pe) + t * p.k_pe_stride, p.rope_dim);
  }
}

extern "C" __global__ void __launch_bounds__(256) fm_gather(const __grid_constant__ FmGatherParams p) {
  for (int64_t t = fm::warp_index(); t < p.tokens; t += fm::warp_count()) {
    const int64_t id = fm::source_id(p, t);
    const bool present = id >= 0 && id < p.num_pages * p.page_size;
    const int64_t page = present ? id / p.page_size : 0, offset = present ? id % p.page_size : 0;
    uint16_t* to = reinterpret_cast<uint16_t*>(p.out) + t * p.out_stride;
    fm::gather_row(to, present ? fm::row_at(p.cache_nope, p.cache_nope_stride, page, offset) : nullptr, p.nope_dim,
                   p.source_fp16);
    if (p.rope_dim > 0)
      fm::gather_row(to + p.nope_dim, present ? fm::row_at(p.cache_rope, p.cache_rope_stride, page, offset) : nullptr,
                     p.rope_dim, p.source_fp16);
  }
}

// One block: offsets[r] = sum of the clamped lengths before r.
extern "C" __global__ void __launch_bounds__(1024) fm_offsets(const __grid_constant__ FmOffsetsParams p) {
  __shared__ int64_t warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;
  for (int base = 0; base < p.batch; base += 1024) {
    const int r = base + threadIdx.x;
    const int64_t length = r < p.batch ? min(max(p.seq_lens[r * p.seq_lens_stride], 0), p.max_seq_len) : 0;
    int64_t sum = length;  // inclusive within the warp
    for (int d = 1; d < 32; d *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int64_t earlier = 0, total = 0;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) earlier += warp_sums[w];
      total += warp_sums[w];
    }
    if (r < p.batch) p.offsets[r] = before + earlier + sum - length;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.offsets[p.batch] = before;
}
