// Parts of a common length (common_parts.h), where a thread has one or two units (small.cuh): the length is found by trying several
// at once, a barrier for each round; then a thread per unit leaves it for the threads of its parts.
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

/* Tiles of the units of a thread. */
template <int kUnits>
struct OwnTiles {
  int32_t of[kUnits];
};

/* The least length with which the units of all threads have no more parts than there are workers; 0: there is none. Not a part of
   `plan`, whose registers are short. */
template <int kUnits>
__device__ inline __attribute__((noinline)) Position common_length(const FmPlanShape& shape, Shared& shared,
                                                                   CommonSearch<Position> search, OwnTiles<kUnits> tiles) {
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
#pragma unroll
    for (int i = 0; i < kLengths; ++i) {
      Divisor<Position> length = of_lane;
      length.by = length_at(i);
      length.inverse = __shfl_sync(~0u, of_lane.inverse, i);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        parts[i / 2] += uint32_t(parts_counted(shape, length.by, ceil_div(tiles.of[k], length))) << i % 2 * 16;
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

/* The common length of the parts of all units; 0: they are not cut this way. */
template <class Planner>
__device__ __forceinline__ Position common_length(const Planner& planner, const Line<Position>& line) {
  const CommonSearch<Position> search = common_search<Position>(planner.shape, line, planner.filled, kMaxLine);
  if (search.most < search.least) return 0;
  OwnTiles<Planner::kOwn> tiles{};
  planner.for_each(planner.units, [&](int k, int32_t) { tiles.of[k] = tiles_of(planner.shape, planner.own[k].span); });
  return common_length<Planner::kOwn>(planner.shape, planner.shared, search, tiles);
}

/* Counts of a CommonTally in a byte each: there are no more than workers. */
__device__ __forceinline__ uint32_t pack(const CommonTally& tally) {
  return uint32_t(tally.filled) << 16 | uint32_t(tally.cut) << 8 | uint32_t(tally.parts);
}

__device__ __forceinline__ CommonTally unpack(uint32_t packed) {
  return {int32_t(packed & 0xff), int32_t(packed >> 8 & 0xff), int32_t(packed >> 16)};
}

/* Writes all units, with parts no longer than `longest`. */
template <class Planner>
__device__ __forceinline__ Tally write_common(const Planner& planner, Position longest) {
  const FmPlanShape& shape = planner.shape;
  auto& common = planner.shared.common;
  Parts<Position> parts[Planner::kOwn];
  uint32_t packed[Planner::kOwn] = {}, all_packed = 0;
  planner.for_each(planner.units, [&](int k, int32_t) {
    const int32_t tiles = tiles_of(shape, planner.own[k].span);
    parts[k] = parts_up_to(shape, longest, tiles);
    if (tiles > 0) all_packed += packed[k] = pack({parts[k].count, parts[k].count > 1, 1});
  });
  const Scanned scanned = scan_block(all_packed, planner.shared.warp_sum[1]);
  const CommonTally all = unpack(scanned.all);
  const Turns turns{all.parts, planner.units - all.filled, 1};
  uint32_t packed_before = scanned.before;
  planner.for_each(planner.units, [&](int k, int32_t index) {
    const CommonTally before = unpack(packed_before);
    const int32_t empty = index - before.filled;
    const Unit& unit = planner.own[k].unit;
    packed_before += packed[k];
    if (packed[k] == 0) {
      return planner.write_item(item_of_empty(shape, turns, empty, before.parts), unit, parts[k], 0, Tally{});
    }
    common.unit[before.filled] = {unit, parts[k], tally_of(before)};
    common.first_part[before.filled] = before.parts;
    common.empty_before[before.filled] = empty;
    if (parts[k].count == 1) return;
    store(section<FmMerge>(planner.params, planner.params.layout.merges) + before.cut, make_merge(unit, parts[k], tally_of(before)));
  });
  __syncthreads();
  int32_t* worker_begin = section<int32_t>(planner.params, planner.params.layout.worker_begin);
#pragma unroll 1
  for (int32_t worker = planner.thread; worker <= shape.workers; worker += blockDim.x) worker_begin[worker] = first_item(shape, turns, worker);
  const auto first_part = [&](int32_t rank) { return common.first_part[rank]; };
#pragma unroll 1
  for (int32_t part = planner.thread; part < turns.parts; part += blockDim.x) {
    const int32_t rank = last_at_or_before(all.filled, part, first_part);
    const CutUnit& of = common.unit[rank];
    planner.write_item(item_of_part(shape, turns, part, common.empty_before[rank]), of.unit, of.parts, part - first_part(rank), of.before);
  }
  Tally tally = tally_of(all);
  tally.items = items_of(turns);
  return tally;
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
