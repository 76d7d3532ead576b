// Dealing units out longest first (longest_first.h), by all threads of the block:
//
//   count  a thread per unit: its parts -> scan
//   sort   a thread per unit: how many last parts are longer than its own
//   deal   in rounds, a thread per worker: how many have less, and so which of the next parts it gets
//   write  a thread per part, and per worker
//
// Each instruction is there once if it can be: fetching them is what a call takes most of its time for.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "longest_first.h"

namespace ferromla {
namespace plan {

constexpr int kWorkerGroups = kMostDealtWorkers / 32; /* of which a warp has one at a time */
constexpr int kAtOnce = 16;                           /* numbers that are compared */
/* Parts that come before, and how often a unit is cut, are one number. */
constexpr int32_t kPartBits = 20;
constexpr int32_t kPartMask = (1 << kPartBits) - 1;

/* Up to kMost units, and a part more for each worker but one. */
template <int kMost>
struct alignas(16) DealingOut {
  static constexpr int kUnitGroups = kMost / 32, kParts = kMost + kMostDealtWorkers;
  static constexpr int kUnitBits = kMost <= 512 ? 9 : 10;
  static_assert(kMost <= 1 << kUnitBits && kMost % 32 == 0 && kUnitGroups <= 32, "units");

  uint32_t last[kMost];                 /* of a unit's last part: tiles << kUnitBits, and more the earlier the unit: then it counts as longer */
  uint32_t load[2][kMostDealtWorkers];  /* in turns: what a worker has << 8 | worker; ~0: there is none */
  uint32_t least[2][kWorkerGroups];     /* of these, of a group */
  int32_t of_group[kUnitGroups];        /* parts of a group of units before the last ones, and cut units << kPartBits */
  int32_t more[kMost];                  /* parts of a unit before its last one */
  int32_t before[kMost];                /* as of_group, of the units before it */
  int32_t rank[kMost];                  /* of its last part */
  int32_t tiles[kParts];                /* of a part by rank */
  uint32_t place[kParts];               /* of a part by rank: its worker, and how many parts that has before it << 8 */
  int32_t begin[kMostDealtWorkers + 1]; /* first item of a worker; before that how many it has */
};

struct DealtParts {
  int32_t step; /* 0: units are not dealt out this way, and nothing is written */
  Tally all;
};

template <int kMost>
struct DealtOut {
  using Shared = DealingOut<kMost>;
  const FmPlanShape& shape;
  const LongestFirst& way;
  Shared& shared;
  const int32_t units;
  int32_t longer; /* last parts that are longer than a step */
  int32_t all;    /* as of_group, of all units */

  __device__ __forceinline__ int32_t more() const { return all & kPartMask; }
  __device__ __forceinline__ int32_t merges() const { return all >> kPartBits; }
  __device__ __forceinline__ int32_t parts() const { return units + more(); }

  /* The parts of units of `tiles_at(index)` tiles; nobody has any. */
  template <class Tiles>
  __device__ __forceinline__ void count(const Tiles& tiles_at) {
    if (threadIdx.x < Shared::kUnitGroups) shared.of_group[threadIdx.x] = 0;
#pragma unroll 1
    for (int32_t worker = threadIdx.x; worker < kMostDealtWorkers; worker += blockDim.x) {
      const uint32_t load = worker < shape.workers ? worker : ~0u;
      shared.load[0][worker] = load, shared.begin[worker] = 0;
      if (worker % 32 == 0) shared.least[0][worker / 32] = load, shared.least[1][worker / 32] = ~0u;
    }
    __syncthreads();
    longer = 0;
#pragma unroll 1
    for (int32_t first = 0; first < units; first += blockDim.x) {
      const int32_t index = first + threadIdx.x, tiles = index < units ? tiles_at(index) : 0, more = way.parts_before_last(tiles);
      const int32_t last = tiles - more * way.step, own = more + (more > 0 ? 1 << kPartBits : 0), upto = scan_warp(own);
      if (index < kMost) {
        shared.more[index] = more;
        shared.before[index] = upto - own; /* in its group, so far */
        shared.last[index] = index < units ? uint32_t(last) << Shared::kUnitBits | (kMost - 1 - index) : 0;
        if (index % 32 == 31) shared.of_group[index / 32] = upto;
      }
      longer += __syncthreads_count(last > way.step);
    }
    all = 0;
#pragma unroll
    for (int i = 0; i < Shared::kUnitGroups; ++i) all += shared.of_group[i];
  }

  /* What comes before each unit, and the tiles of parts by rank. */
  __device__ __forceinline__ void sort() const {
#pragma unroll 1
    for (int32_t index = threadIdx.x; index < units; index += blockDim.x) {
      const uint32_t last = shared.last[index];
      const int32_t tiles = last >> Shared::kUnitBits, rank = count_in(shared.last, units, [last](uint32_t other) { return other > last; });
      int32_t before = shared.before[index];
#pragma unroll
      for (int i = 0; i < Shared::kUnitGroups - 1; ++i) before += i < index / 32 ? shared.of_group[i] : 0;
      shared.before[index] = before;
      const int32_t among_all = rank + (tiles > way.step ? 0 : more());
      shared.rank[index] = among_all;
      shared.tiles[among_all] = tiles;
    }
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < more(); i += blockDim.x) shared.tiles[longer + i] = way.step;
    __syncthreads();
  }

  /* In rounds: of the workers that have no more than the one with least will have, whoever has least gets the longest part that is
     left, the next one the next, and so on. Returns whether nobody has too much in the end. */
  __device__ __forceinline__ bool deal() const {
    /* Of one part more than there are workers two have the same. */
    if (parts() > shape.workers && int32_t((cost_of(shape.workers - 1) + cost_of(shape.workers)) >> 8) > way.most) {
      __syncthreads();
      return false;
    }
    int turn = 0;
#pragma unroll 1
    for (int32_t next = 0; next < parts(); turn ^= 1) {
      uint32_t least = ~0u;
#pragma unroll
      for (int i = 0; i < kWorkerGroups; ++i) least = min(least, shared.least[turn][i]);
      const uint32_t most = (least | 0xff) + cost_of(next);
      int32_t takers = 0;
#pragma unroll 1
      for (int32_t first = 0; first < shape.workers; first += blockDim.x) {
        const int32_t worker = first + threadIdx.x;
        bool takes = false;
        if (worker / 32 * 32 < shape.workers) { /* a whole warp */
          uint32_t own = shared.load[turn][worker];
          const auto has_less = [own](uint32_t other) { return other < own; };
          const int32_t rank = next == 0 ? worker : next + count_in(shared.load[turn], shape.workers, has_less); /* first: nobody has any */
          takes = own <= most && rank < parts();
          if (takes) {
            const int32_t has = shared.begin[worker];
            shared.begin[worker] = has + 1;
            shared.place[rank] = has << 8 | worker;
            own += cost_of(rank);
          }
          shared.load[turn ^ 1][worker] = own;
          const uint32_t least_left = __reduce_min_sync(~0u, own);
          if (worker % 32 == 0) shared.least[turn ^ 1][worker / 32] = least_left;
        }
        takers += __syncthreads_count(takes);
      }
      next += takers;
    }
    bool fair = true;
#pragma unroll 1
    for (int32_t worker = threadIdx.x; worker < shape.workers; worker += blockDim.x)
      fair &= int32_t(shared.load[turn][worker] >> 8) <= way.most;
    if (threadIdx.x < 32) count_up();
    return __syncthreads_and(fair);
  }

  __device__ __forceinline__ uint32_t cost_of(int32_t rank) const { return uint32_t(shared.tiles[rank] + shape.fixed_cost) << 8; }

  /* How many of at least `number` numbers, which are followed by such that are not, are counted. */
  template <class Counted>
  __device__ __forceinline__ static int32_t count_in(const uint32_t* numbers, int32_t number, const Counted& counted) {
    int4 count{0, 0, 0, 0};
#pragma unroll 1
    for (int32_t first = 0; first < number; first += kAtOnce) {
      uint4 four[kAtOnce / 4];
#pragma unroll
      for (int i = 0; i < kAtOnce / 4; ++i) four[i] = reinterpret_cast<const uint4*>(numbers + first)[i];
#pragma unroll
      for (const uint4& of : four) count.x += counted(of.x), count.y += counted(of.y), count.z += counted(of.z), count.w += counted(of.w);
    }
    return count.x + count.y + count.z + count.w;
  }

  /* From how many parts workers have to where they begin. One warp, a lane for a few workers. */
  __device__ __forceinline__ void count_up() const {
    constexpr int32_t kOfLane = kMostDealtWorkers / 32;
    int32_t* own = shared.begin + threadIdx.x * kOfLane;
    int32_t has[kOfLane], all = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) all += has[i] = own[i];
    int32_t begin = scan_warp(all) - all;
#pragma unroll
    for (int i = 0; i < kOfLane; begin += has[i++]) own[i] = begin;
    if (threadIdx.x == 31) own[kOfLane] = begin;
  }

  /* The items of all units, and their merges: a thread per part, which finds its unit. */
  template <class UnitAt>
  __device__ __forceinline__ void write(const FmPlanParams& params, const UnitAt& unit_at) const {
    const auto first_part = [this](int32_t index) { return index + (shared.before[index] & kPartMask); };
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < parts(); i += blockDim.x) {
      const int32_t index = more() == 0 ? i : last_at_or_before(units, i, first_part);
      write_part(params, index, i - first_part(index), unit_at(index));
    }
  }

  /* Part j of a unit, and with its first one the merge. */
  __device__ __forceinline__ void write_part(const FmPlanParams& params, int32_t index, int32_t j, const Unit& unit) const {
    const int32_t more = shared.more[index], more_before = shared.before[index] & kPartMask, cut_before = shared.before[index] >> kPartBits;
    const Parts<int32_t> parts{0, way.step, more + 1, int32_t(shared.last[index] >> Shared::kUnitBits) + more * way.step};
    const Tally before{index + more_before, cut_before, more_before + cut_before};
    const uint32_t place = shared.place[j < more ? longer + more_before + j : shared.rank[index]];
    store(section<FmWorkItem>(params, params.layout.items) + shared.begin[place & 0xff] + (place >> 8), make_item(unit, parts, j, before));
    if (j == 0 && more > 0) store(section<FmMerge>(params, params.layout.merges) + cut_before, make_merge(unit, parts, before));
  }
};

/* Plans `units` units, of so many tiles each, unless they are too many parts or do not share out this way. `unit_at(index)`: a unit. */
template <int kMost, class Tiles, class UnitAt>
__device__ __forceinline__ DealtParts deal_longest_first(const FmPlanParams& params, const LongestFirst& way, DealingOut<kMost>& shared,
                                                         int32_t units, const Tiles& tiles_at, const UnitAt& unit_at) {
  if (way.step == 0) return {};
  const FmPlanShape& shape = params.shape;
  DealtOut<kMost> dealt{shape, way, shared, units, 0, 0};
  dealt.count(tiles_at);
  if (dealt.more() >= shape.workers) return {};
  dealt.sort();
  if (!dealt.deal()) return {};
  dealt.write(params, unit_at);
  write_workers(params, [&](int32_t worker) { return shared.begin[worker]; });
  return {way.step, {dealt.parts(), dealt.merges(), dealt.more() + dealt.merges()}};
}

}  // namespace plan
}  // namespace ferromla
