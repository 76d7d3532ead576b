// Parts of a common length (common_parts.h), where units are few and have been left in shared memory (small.cuh): the length is found by
// trying several at once, a barrier for each round; then a thread per unit counts its parts, and one per part writes it. Not a part
// of `plan`, whose registers are short.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "common_parts.h"
#include "small_shared.cuh"

namespace ferromla {
namespace plan {
namespace small {

/* The least length with which units have no more parts than there are workers; 0: there is none. */
__device__ __forceinline__ Position common_length(const FmPlanShape& shape, Shared& shared, int32_t units,
                                                  CommonSearch<Position> search) {
  constexpr int kLengths = 2 * kPairsOfLengths;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  Position low = search.least, high = search.most + 1; /* can do, or none can */
#pragma unroll 1
  for (int turn = 0; low < high; turn ^= 1) {
    /* Up to the greatest that is not known yet: if that is too short none will do. */
    const Position step = (high - low - 1) / kLengths + 1;
    const auto length_at = [&](int i) { return max(low, high - 1 - (kLengths - 1 - i) * step); };
    const Divisor<Position> of_lane(length_at(lane % kLengths));
    uint32_t parts[kPairsOfLengths] = {};
#pragma unroll 1
    for (int32_t first = 0; first < units; first += blockDim.x) {
      const int32_t index = first + threadIdx.x, tiles = index < units ? shared.whole.tiles[index] : 0;
#pragma unroll
      for (int i = 0; i < kLengths; ++i) {
        Divisor<Position> length = of_lane;
        length.by = length_at(i);
        length.inverse = __shfl_sync(~0u, of_lane.inverse, i);
        parts[i / 2] += uint32_t(parts_counted(shape, length.by, ceil_div(tiles, length))) << i % 2 * 16;
      }
    }
#pragma unroll
    for (int pair = 0; pair < kPairsOfLengths; ++pair) {
      const uint32_t of_warp = __reduce_add_sync(~0u, parts[pair]);
      if (lane == 0) shared.parts_of_lengths[turn][pair][warp] = of_warp;
    }
    __syncthreads();
    int first = kLengths; /* that can do */
#pragma unroll
    for (int pair = kPairsOfLengths - 1; pair >= 0; --pair) {
      const uint32_t all = __reduce_add_sync(~0u, lane < warps ? shared.parts_of_lengths[turn][pair][lane] : 0);
      if (int32_t(all >> 16) <= shape.workers) first = 2 * pair + 1;
      if (int32_t(all & 0xffff) <= shape.workers) first = 2 * pair;
    }
    const Position longest_too_short = length_at(first - 1), shortest = length_at(first);
    if (first > 0) low = longest_too_short + 1;
    if (first < kLengths) high = shortest;
  }
  return low <= search.most ? low : 0;
}

/* Counts of a CommonTally in a byte each: there are no more than workers. */
__device__ __forceinline__ uint32_t pack(const CommonTally& tally) {
  return uint32_t(tally.filled) << 16 | uint32_t(tally.cut) << 8 | uint32_t(tally.parts);
}

__device__ __forceinline__ CommonTally unpack(uint32_t packed) {
  return {int32_t(packed & 0xff), int32_t(packed >> 8 & 0xff), int32_t(packed >> 16)};
}

/* Leaves what comes before each unit, parts being no longer than `longest`; returns what there is of all. */
__device__ __forceinline__ CommonTally count_parts(const FmPlanShape& shape, Shared& shared, int32_t units, Position longest) {
  uint32_t carry = 0;
  int turn = 1; /* the line was laid out with the other row */
#pragma unroll 1
  for (int32_t first = 0; first < units; first += blockDim.x, turn ^= 1) {
    const int32_t index = first + threadIdx.x, tiles = index < units ? shared.whole.tiles[index] : 0;
    const int32_t count = parts_up_to(shape, longest, tiles).count;
    const Scanned scanned = scan_block(tiles > 0 ? pack({count, count > 1, 1}) : 0, shared.warp_sum[turn]);
    if (index < units) shared.whole.before[index] = carry + scanned.before;
    carry += scanned.all;
  }
  __syncthreads();
  return unpack(carry);
}

/* The common length, if parts of it are about as good as cuts at even shares; else 0. */
__device__ inline __attribute__((noinline)) Position find_common_length(const FmPlanShape& shape, Shared& shared, Line<Position> line) {
  const CommonSearch<Position> search = common_search<Position>(shape, line, count_filled(shared, line.units), kMaxLine);
  if (search.equal > 0) {
    bool equal = true;
    for (int32_t index = threadIdx.x; index < line.units; index += blockDim.x) {
      const Position tiles = shared.whole.tiles[index];
      equal = equal && (tiles == 0 || tiles == search.equal);
    }
    if (__syncthreads_and(equal)) return 0;
  }
  return common_length(shape, shared, line.units, search);
}

/* Cuts units into parts no longer than `longest`. */
__device__ inline __attribute__((noinline)) Tally cut_alike(const FmPlanParams& params, Shared& shared, Line<Position> line, Position longest) {
  const FmPlanShape& shape = params.shape;
  const auto& whole = shared.whole;
  const CommonTally all = count_parts(shape, shared, line.units, longest);
  const Turns turns{all.parts, line.units - all.filled, 1};
  FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
#pragma unroll 1
  for (int32_t index = threadIdx.x; index < line.units; index += blockDim.x) {
    const CommonTally before = unpack(whole.before[index]);
    const Parts<Position> parts = parts_up_to(shape, longest, whole.tiles[index]);
    if (parts.tiles == 0) {
      store(items + item_of_empty(shape, turns, index - before.filled, before.parts), make_item(whole.unit[index], parts, 0, Tally{}));
    } else if (parts.count > 1) {
      store(section<FmMerge>(params, params.layout.merges) + before.cut, make_merge(whole.unit[index], parts, tally_of(before)));
    }
  }
  write_workers(params, [&](int32_t worker) { return first_item(shape, turns, worker); });
  /* Of units with as many parts before them the last one has tiles. */
  const auto first_part = [&](int32_t index) { return unpack(whole.before[index]).parts; };
#pragma unroll 1
  for (int32_t part = threadIdx.x; part < turns.parts; part += blockDim.x) {
    const int32_t index = last_at_or_before(line.units, part, first_part);
    const CommonTally before = unpack(whole.before[index]);
    const Parts<Position> parts = parts_up_to(shape, longest, whole.tiles[index]);
    store(items + item_of_part(shape, turns, part, index - before.filled),
          make_item(whole.unit[index], parts, part - before.parts, tally_of(before)));
  }
  return {items_of(turns), all.cut, tally_of(all).slots};
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
