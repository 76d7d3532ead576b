// The units of any batch, whose places on the line live in shared memory, or in the scratch sections of the plan if they are many; scans
// over them in rounds, and how a ragged one is found.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "wide_scan.cuh"

namespace ferromla {
namespace plan {

/* Of more units the places are in the scratch sections, and of more requests the first units. */
constexpr int kSharedUnits = 2560;

/* Items and merges, summed by one scan: merges << 32 | items. */
__device__ __forceinline__ int64_t pack(const Parts<int64_t>& parts) { return (int64_t{parts.count > 1} << 32) + parts.count; }

__device__ __forceinline__ Tally unpack(int64_t packed, int32_t units) {
  const int32_t items = static_cast<int32_t>(packed & 0xffffffff), merges = static_cast<int32_t>(packed >> 32);
  return {items, merges, items - (units - merges)};
}

struct Units {
  using Position = int64_t;

  const FmPlanParams& params;
  const FmPlanShape& shape;
  Position* unit_start;
  int32_t* first_unit;
  int64_t (*warp_sum)[kMaxWarps]; /* two rows in turn: the barrier of one scan also ends the reads of the one before */
  uint32_t units;
  int turn = 0;

  /* `start`, `first`: room for the places of kSharedUnits and one, and for as many first units. */
  __device__ __forceinline__ Units(const FmPlanParams& p, Position* start, int32_t* first, int64_t (*sums)[kMaxWarps])
      : params(p), shape(p.shape), warp_sum(sums), units(p.layout.units) {
    unit_start = units <= kSharedUnits ? start : section<Position>(p, p.layout.unit_start);
    first_unit = shape.batch <= kSharedUnits ? first : section<int32_t>(p, p.layout.first_unit);
  }

  /* Calls value(i) for every i below `count`, each once, and tell(i, sum of the values before i) afterwards;
     returns the sum. One thread calls both, in rounds of kPerThread; `slot` counts its calls in a round. */
  template <int kPerThread, class Value, class Tell>
  __device__ __forceinline__ int64_t scan_all(uint32_t count, Value value, Tell tell) {
    int64_t carry = 0;
    for (uint32_t base = 0; base < count; base += blockDim.x * kPerThread) {
      const uint32_t first = base + threadIdx.x * kPerThread;
      int64_t values[kPerThread];
      int64_t sum = 0;
#pragma unroll
      for (int slot = 0; slot < kPerThread; ++slot) {
        values[slot] = first + slot < count ? value(first + slot, slot) : 0;
        sum += values[slot];
      }
      const WideScan scanned = scan_block(sum, warp_sum[turn++ % 2]);
      int64_t before = carry + scanned.before;
#pragma unroll
      for (int slot = 0; slot < kPerThread; ++slot) {
        if (first + slot < count) tell(first + slot, slot, before);
        before += values[slot];
      }
      carry += scanned.all;
    }
    return carry;
  }

  /* Units of a request that overlapping ranges ask for past the last are left out. */
  __device__ void read_requests() {
    const int64_t most = params.layout.units;
    const int64_t all = scan_all<4>(
        shape.batch,
        [&](int32_t request, int) {
          return int64_t{blocks_of(shape, load_query_range(params, request).len)} * shape.kv_heads;
        },
        [&](int32_t request, int, int64_t before) {
          first_unit[request] = static_cast<int32_t>(smaller(before, most));
        });
    units = static_cast<uint32_t>(smaller(all, most));
    __syncthreads();
  }

  __device__ Unit unit_at(int32_t index) const {
    if (!shape.ragged) return load_uniform_unit(params, index);
    const auto first = [this](int32_t request) { return first_unit[request]; };
    const int32_t request = last_at_or_before(shape.batch, index, first);
    return ragged_unit(shape, request, load_query_range(params, request), load_seq_len(params, request),
                       index - first_unit[request]);
  }

  __device__ Span<Position> span_of(int32_t index) const {
    return {unit_start[index], unit_start[index + 1]};
  }
};

}  // namespace plan
}  // namespace ferromla
