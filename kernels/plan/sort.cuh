// Sorting numbers by a thread for each, longest first: a radix sort, which compares none of them and keeps equal ones in order.
#pragma once
#include <stdint.h>

#include "block.cuh"

namespace ferromla {
namespace plan {

constexpr int kDigitBits = 5, kDigits = 1 << kDigitBits;
static_assert(kDigits == 32, "a lane for each digit");

template <int kMost>
struct Sorting {
  uint32_t count[kDigits][kMaxWarps + 1]; /* numbers of a warp that have a digit; then where these go */
  uint16_t order[kMost];
};

/* From how many numbers of each warp have this lane's digit to where they go. By a warp. */
__device__ __forceinline__ void count_up(uint32_t* of_warp) {
  const int32_t warps = blockDim.x / 32;
  uint32_t have = 0;
#pragma unroll 8
  for (int32_t warp = 0; warp < warps; ++warp) have += of_warp[warp];
  uint32_t next = scan_warp(have) - have;
#pragma unroll 8
  for (int32_t warp = 0; warp < warps; ++warp) {
    const uint32_t own = of_warp[warp];
    of_warp[warp] = next;
    next += own;
  }
}

/* Which of the first `number` comes at this thread's place. `key_of(i)`: the i-th, up to `most`. No more than there are threads. */
template <int kMost, class Key>
__device__ __forceinline__ int32_t sort_longest_first(Sorting<kMost>& shared, int32_t number, uint32_t most, const Key& key_of) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t own = threadIdx.x;
  const bool there = own < number;
#pragma unroll 1
  for (int shift = 0; most >> shift > 0; shift += kDigitBits) {
    const uint32_t digit = there ? ~(uint32_t(key_of(own)) >> shift) & (kDigits - 1) : 0;
    uint32_t same = __ballot_sync(~0u, there);
#pragma unroll
    for (int bit = 0; bit < kDigitBits; ++bit) {
      const bool set = digit >> bit & 1;
      const uint32_t have = __ballot_sync(~0u, set);
      same &= set ? have : ~have;
    }
    const uint32_t before = __popc(same & ((1u << lane) - 1));
    shared.count[lane][warp] = 0;
    __syncwarp();
    if (there && before == 0) shared.count[digit][warp] = __popc(same);
    __syncthreads();
    if (warp == 0) count_up(shared.count[lane]);
    __syncthreads();
    if (there) shared.order[shared.count[digit][warp] + before] = static_cast<uint16_t>(own);
    __syncthreads();
    if (there) own = shared.order[threadIdx.x];
  }
  return own;
}

}  // namespace plan
}  // namespace ferromla
