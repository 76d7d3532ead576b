// Sums of 64 bits over the threads of the block.
#pragma once
#include <stdint.h>

#include "block.cuh"

namespace ferromla {
namespace plan {

struct WideScan {
  int64_t before; /* sum over the threads before this one */
  int64_t all;
};

__device__ __forceinline__ int64_t scan_warp(int64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t below = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

/* Every warp scans the warp sums again for itself: one barrier instead of two. `sums`: room for one of each warp, which may be written
   again after the next barrier. */
__device__ __forceinline__ WideScan scan_block(int64_t value, int64_t* sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t upto = scan_warp(value, lane);
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  const int64_t warps_upto = scan_warp(lane < int(blockDim.x) / 32 ? sums[lane] : 0, lane);
  const int64_t warps_before = __shfl_sync(~0u, warps_upto, warp == 0 ? 0 : warp - 1);
  return {(warp == 0 ? 0 : warps_before) + upto - value, __shfl_sync(~0u, warps_upto, 31)};
}

}  // namespace plan
}  // namespace ferromla
