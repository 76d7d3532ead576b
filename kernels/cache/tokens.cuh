// Tokens of a cache, one warp each: which warp has which, and where a token lies.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/launch.cuh"

namespace fm {

__device__ __forceinline__ int64_t warp_index() {
  return (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}
__device__ __forceinline__ int64_t warp_count() { return (int64_t)gridDim.x * (blockDim.x / 32); }

struct Division {
  int64_t quotient, remainder;
};

// Most numbers fit 32 bits, and their division is several times as fast.
__device__ __forceinline__ Division divided(int64_t number, int64_t divisor) {
  if ((uint64_t)(number | divisor) >> 32 != 0) return {number / divisor, number % divisor};
  const uint32_t quotient = (uint32_t)number / (uint32_t)divisor;
  return {quotient, (uint32_t)number - quotient * (uint32_t)divisor};
}

struct Place {
  bool present;
  int64_t page, offset;  // 0 where it is not
};

// Of the slot `page * page_size + offset`.
__device__ __forceinline__ Place place_of(int64_t slot, int64_t num_pages, int page_size) {
  if (slot < 0 || slot >= num_pages * page_size) return {false, 0, 0};
  const auto [page, offset] = divided(slot, page_size);
  return {true, page, offset};
}

// The request r of `batch` with offsets[r] <= t < offsets[r + 1], or -1.
__device__ __forceinline__ int request_of(const int64_t* offsets, int64_t stride, int batch, int64_t t) {
  if (batch == 0 || t >= offsets[batch * stride]) return -1;
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (offsets[middle * stride] <= t ? low : high) = middle;
  }
  return low;
}

// The physical id (page * page_size + offset) of row `t`, or -1.
__device__ __forceinline__ int64_t source_id(const FmTokenSource& p, int64_t t) {
  if (p.block_table == nullptr) {
    if (p.ids == nullptr) return t;
    return p.ids_are_64bit ? reinterpret_cast<const int64_t*>(p.ids)[t * p.ids_stride]
                           : reinterpret_cast<const int32_t*>(p.ids)[t * p.ids_stride];
  }
  const int request = request_of(p.offsets, 1, p.batch, t);
  if (request < 0) return -1;
  const auto [column, offset] = divided(t - p.offsets[request], p.page_size);
  if (column >= p.max_pages) return -1;
  const int64_t page = p.block_table[request * p.block_table_stride + column];
  return page < 0 ? -1 : page * p.page_size + offset;
}

// Running sums of what `length` gives for 0 .. count: at i of those before i, at count of all. One block of at most
// 1024 threads, all of them.
template <class Length>
__device__ __forceinline__ void running_sums(int64_t* sums, int64_t stride, int count, Length length) {
  __shared__ int64_t warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;
  for (int base = 0; base < count; base += blockDim.x) {
    const int i = base + threadIdx.x;
    const int64_t own = i < count ? length(i) : 0;
    int64_t sum = own;  // inclusive within the warp
    for (int d = 1; d < 32; d *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int64_t earlier = 0, total = 0;
    for (int w = 0; w < (int)(blockDim.x / 32); ++w) {
      if (w < warp) earlier += warp_sums[w];
      total += warp_sums[w];
    }
    if (i < count) sums[i * stride] = before + earlier + sum - own;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[count * stride] = before;
}

}  // namespace fm
