// Planning where the mode fixes the parts of each unit (num_splits, batch_invariant), which then depend on its own length alone.
//
//   read_requests  ragged only (units.cuh)
//   of few units:
//   count_units    a thread per unit: its parts -> scan: where it stands on the line, how many parts and cut units come before it
//   rank_parts     if parts are dealt (dealt.h): two elements of each unit, its last part and those before it, which are equally long,
//                  sorted (sort.cuh) -> scan: how many parts come before each; then deal.cuh
//   write_part     a thread per item, which finds its part and writes it, if it is the first one of several the merge, too
//   of more, which are not dealt:
//   lay_out        a thread per unit: cost -> scan
//   write_units    a thread per unit: parts -> scan -> its items and merge
//   of both, where parts are not dealt:
//   write_workers  a thread per cut: the end of a part that is nearest
//
// Few units are planned with positions of 32 bits unless the line is longer than these hold.
//
// Tiles are kept, or read off the line, in all steps after the first, so lengths that change under a running planner give a plan for a
// mixture of both, never a write outside the layout.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "deal.cuh"
#include "dealt.h"
#include "small_shared.cuh"
#include "sort.cuh"
#include "units.cuh"

namespace ferromla {
namespace plan {
namespace by_count {

/* As far as 32 bits hold what a worker has (deal.cuh). */
constexpr uint32_t kMaxLine = 1 << 24;

/* Of each unit the parts before its last one, which are equally long, and that. */
constexpr int kMostElements = 2 * kMostDealtUnits;
static_assert(kMostElements <= kMaxThreads, "a thread for each");

/* What units cost, all together, their parts, how many have several, and the longest part. */
template <class Cost>
struct alignas(16) Counts {
  Cost cost;
  uint32_t items, merges, longest;
};

template <class Position>
struct FewUnits {
  static constexpr bool kShort = sizeof(Position) == sizeof(int32_t);
  /* A cost from kMaxLine on is any from there on where positions have 32 bits. */
  using Cost = std::conditional_t<kShort, uint32_t, int64_t>;
  using Load = std::conditional_t<kShort, uint32_t, uint64_t>;

  alignas(16) Load load[2][kMostDealtWorkers];
  Position start[kMostDealtUnits + 1];
  Counts<Cost> of_warp[kMaxWarps];
  DealtUnit unit[kMostDealtUnits];
  int32_t item[kMostDealtUnits + 1];
  int32_t rank[kMostElements]; /* of the first part of each */
  union {
    Sorting<kMostElements> sorting;
    struct {
      uint16_t of_rank[kMostDealtParts]; /* to whose parts it belongs */
      uint16_t at_item[kMostDealtParts]; /* its rank */
    } part;
  };
  uint32_t warp_sum[kMaxWarps];
};

struct alignas(16) Shared {
  union {
    struct {
      int64_t unit_start[kSharedUnits + 1];
      int32_t unit_item[kSharedUnits + 1];
    };
    FewUnits<int32_t> few;
    FewUnits<int64_t> few_on_a_long_line;
  };
  int64_t warp_sum[2][kMaxWarps];
  int32_t first_unit[kSharedUnits];
};

__device__ __forceinline__ uint32_t add_lanes(uint32_t value) { return __reduce_add_sync(~0u, value); }
__device__ __forceinline__ int64_t add_lanes(int64_t value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

template <class Position>
__device__ __forceinline__ Line<Position> line_of(const FmPlanShape& shape, Position total, int32_t units) {
  return {total, Divisor<Position>(even_share(total, Divisor<Position>(shape.workers))), units, 0};
}

/* Where worker `cut` begins, 0 <= cut <= workers, with parts on a line on which unit `i` begins at `start[i]`. */
template <class Position>
__device__ __forceinline__ Cut cut_of(const FmPlanShape& shape, const Line<Position>& line, const Position* start, int32_t cut) {
  if (cut == 0 || line.units == 0) return {0, 0};
  if (cut == shape.workers) return {line.units, 0};
  const Position x = smaller(cut * line.share.by, line.total);
  const int32_t unit = last_at_or_before(line.units, x, [start](int32_t index) { return start[index]; });
  return nearest_boundary(shape, line, unit, Span<Position>{start[unit], start[unit + 1]}, x);
}

/* Where workers begin with parts on such a line, unit `i` with item `unit_item[i]`. */
template <class Position>
__device__ __forceinline__ void write_workers(const FmPlanParams& params, const Line<Position>& line, const Position* start,
                                              const int32_t* unit_item) {
  plan::write_workers(params, [&](int32_t worker) {
    const Cut cut = cut_of(params.shape, line, start, worker);
    return unit_item[cut.unit] + cut.part;
  });
}

template <class Position>
struct FewPlanner {
  using Cost = typename FewUnits<Position>::Cost;
  using Load = typename FewUnits<Position>::Load;
  static constexpr bool kShort = FewUnits<Position>::kShort;
  const Units& batch;
  FewUnits<Position>& few;
  const FmPlanParams& params;
  const FmPlanShape& shape;
  const int32_t units;
  Counts<Cost> all;

  __device__ __forceinline__ FewPlanner(const Units& of, FewUnits<Position>& shared)
      : batch(of), few(shared), params(of.params), shape(of.shape), units(of.units) {}

  __device__ __forceinline__ static Cost limited(Cost cost) {
    return kShort && cost > kMaxLine ? Cost{kMaxLine} : cost;
  }

  /* What comes before this thread's. Leaves `all`. A barrier. */
  __device__ __forceinline__ Counts<Cost> scan(const Counts<Cost>& own) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const Cost cost = scan_costs(own.cost);
    const uint32_t items = scan_warp(own.items), merges = scan_warp(own.merges), longest = __reduce_max_sync(~0u, own.longest);
    if (lane == 31) few.of_warp[warp] = {limited(cost), items, merges, longest};
    __syncthreads();
    const Counts<Cost> of = lane < warps ? few.of_warp[lane] : Counts<Cost>{};
    all = {limited(add_lanes(of.cost)), add_lanes(of.items), add_lanes(of.merges), __reduce_max_sync(~0u, of.longest)};
    const bool before = lane < warp;
    return {add_lanes(before ? of.cost : 0) + cost - own.cost, add_lanes(before ? of.items : 0) + items - own.items,
            add_lanes(before ? of.merges : 0) + merges - own.merges, 0};
  }
  __device__ __forceinline__ static uint32_t scan_costs(uint32_t own) { return scan_warp(own); }
  __device__ __forceinline__ static int64_t scan_costs(int64_t own) { return scan_warp(own, threadIdx.x % 32); }

  /* Leaves the parts of all units. Whether positions hold the line. */
  __device__ __forceinline__ bool count_units() {
    const int32_t index = threadIdx.x;
    const bool there = index < units;
    Parts<Position> parts{0, 0, 0, 0};
    if (there) parts = parts_by_count<Position>(shape, unit_tiles(shape, batch.unit_at(index)));
    const int32_t more = parts.count - 1, step = static_cast<int32_t>(parts.step);
    const DealtUnit own{step, parts.tiles - part_tile(parts, more), more, 0};
    const Cost cost = there ? limited(Cost(parts.tiles) + Cost(shape.fixed_cost)) : 0;
    const Counts<Cost> before = scan({cost, uint32_t(parts.count), more > 0, there ? uint32_t(own.longest()) : 0});
    if (there) {
      few.start[index] = static_cast<Position>(before.cost);
      few.item[index] = before.items;
      few.unit[index] = {own.step, own.last, more, int32_t(before.merges)};
    }
    if (index == 0) few.start[units] = static_cast<Position>(all.cost), few.item[units] = all.items;
    __syncthreads();
    return !kShort || (all.cost < kMaxLine && shape.workers < int32_t(kMaxLine));
  }

  /* Calls f(item, unit, part) for each part in the order of the line. */
  template <class F>
  __device__ __forceinline__ void for_each_part(const F& f) const {
    const int32_t parts = all.items;
#pragma unroll 1
    for (int32_t item = threadIdx.x; item < parts; item += blockDim.x) {
      const int32_t unit = parts == units ? item : last_at_or_before(units, item, [this](int32_t index) { return few.item[index]; });
      f(item, unit, item - few.item[unit]);
    }
  }

  __device__ __forceinline__ int32_t tiles_of(int32_t element) const {
    const DealtUnit& of = few.unit[element / 2];
    return element % 2 == 0 ? of.step : of.last;
  }

  /* Leaves the element of each part by rank. */
  __device__ __forceinline__ void rank_parts() const {
    /* Those of one unit are in order. */
    const uint32_t longest = units > 1 ? all.longest : 0;
    const int32_t element = sort_longest_first(few.sorting, 2 * units, longest, [this](int32_t of) { return tiles_of(of); });
    const bool there = element < 2 * units;
    const uint32_t parts = !there ? 0 : element % 2 == 0 ? few.unit[element / 2].more : 1;
    const int32_t before = small::scan_block(parts, few.warp_sum).before;
    if (there) few.rank[element] = before;
    __syncthreads();
    for_each_part([&](int32_t, int32_t unit, int32_t part) {
      const bool last = part == few.unit[unit].more;
      few.part.of_rank[few.rank[2 * unit + last] + (last ? 0 : part)] = static_cast<uint16_t>(2 * unit + last);
    });
    __syncthreads();
  }

  /* Deals parts out, if they do not share out as well on the line. */
  __device__ __forceinline__ bool deal(const Line<Position>& line, const Deal& deal) const {
    if (!may_be_dealt(deal) || shares_out_on_a_line(all.longest, deal.items, shape.workers, line.share.by)) return false;
    rank_parts();
    return deal_out<Load>(
        deal, shape.fixed_cost, ~Load{0}, few.load, [this](int32_t rank) { return tiles_of(few.part.of_rank[rank]); },
        [&](int32_t rank, int32_t round, int32_t worker) { few.part.at_item[first_item(deal, worker) + round] = static_cast<uint16_t>(rank); });
  }

  __device__ __forceinline__ void write_part(int32_t item, int32_t index, int32_t part) const {
    const DealtUnit& of = few.unit[index];
    const Unit unit = batch.unit_at(index);
    const Parts<Position> parts{0, of.step, of.more + 1, of.more * of.step + of.last};
    const int32_t items = few.item[index];
    const Tally before{items, of.merges, items - (index - of.merges)};
    const UnitSlots slots = unit_slots(shape, params.layout, parts, before);
    store(section<FmWorkItem>(params, params.layout.items) + item, make_item(unit, parts, part, before, slots));
    if (part > 0 || of.more == 0) return;
    store(section<FmMerge>(params, params.layout.merges) + of.merges, make_merge(unit, parts, slots));
  }

  /* Items that are dealt, in their order: so stores of a warp lie next to each other; and the workers. */
  __device__ __forceinline__ void write_dealt(const Deal& deal) const {
#pragma unroll 1
    for (int32_t item = threadIdx.x; item < deal.items; item += blockDim.x) {
      const int32_t rank = few.part.at_item[item], element = few.part.of_rank[rank], unit = element / 2;
      write_part(item, unit, element % 2 == 0 ? rank - few.rank[element] : few.unit[unit].more);
    }
    plan::write_workers(params, [&](int32_t worker) { return first_item(deal, worker); });
  }

  /* False: nothing is written, as the line is too long. */
  __device__ __forceinline__ bool plan() {
    if (!count_units()) return false;
    const Line<Position> line = line_of(shape, static_cast<Position>(all.cost), units);
    const Deal parts{int32_t(all.items), shape.workers};
    if (deal(line, parts)) {
      write_dealt(parts);
    } else {
      for_each_part([this](int32_t item, int32_t unit, int32_t part) { write_part(item, unit, part); });
      write_workers(params, line, few.start, few.item);
    }
    const int32_t merges = all.merges;
    const Tally tally{parts.items, merges, parts.items - (units - merges)};
    if (threadIdx.x == 0) store(section<FmPlanHeader>(params, 0), make_header(line, tally));
    return true;
  }
};

/* Not a part of what is always fetched. */
__device__ inline __attribute__((noinline)) void plan_few_on_a_long_line(const FmPlanParams& params, Shared& shared, uint32_t units) {
  __syncthreads();
  Units batch(params, shared.unit_start, shared.first_unit, shared.warp_sum);
  batch.units = units;
  FewPlanner<int64_t>(batch, shared.few_on_a_long_line).plan();
}

/* Of more units than may be dealt. */
struct ManyPlanner {
  using Position = Units::Position;
  Units& batch;
  const FmPlanParams& params;
  const FmPlanShape& shape;
  const int32_t units;
  int32_t* unit_item;

  __device__ __forceinline__ ManyPlanner(Units& of, Shared& shared)
      : batch(of), params(of.params), shape(of.shape), units(of.units) {
    unit_item = params.layout.units <= kSharedUnits ? shared.unit_item : section<int32_t>(params, params.layout.unit_item);
  }

  __device__ __forceinline__ Line<Position> lay_out() {
    const Position total = batch.scan_all<1>(
        units, [&](int32_t index, int) { return int64_t{unit_tiles(shape, batch.unit_at(index))} + shape.fixed_cost; },
        [&](int32_t index, int, int64_t before) { batch.unit_start[index] = before; });
    if (threadIdx.x == 0) batch.unit_start[units] = total;
    __syncthreads();
    return line_of(shape, total, units);
  }

  __device__ __forceinline__ Tally write_units(const Line<Position>& line) {
    Parts<Position> parts{};
    const int64_t all = batch.scan_all<1>(
        units,
        [&](int32_t index, int) {
          parts = parts_of(shape, line, batch.span_of(index));
          return pack(parts);
        },
        [&](int32_t index, int, int64_t packed) {
          const Tally before = unpack(packed, index);
          const Unit unit = batch.unit_at(index);
          const UnitSlots slots = unit_slots(shape, params.layout, parts, before);
          unit_item[index] = before.items;
          FmWorkItem* items = section<FmWorkItem>(params, params.layout.items) + before.items;
#pragma unroll 1
          for (int32_t j = 0; j < parts.count; ++j) store(items + j, make_item(unit, parts, j, before, slots));
          if (parts.count > 1) store(section<FmMerge>(params, params.layout.merges) + before.merges, make_merge(unit, parts, slots));
        });
    const Tally tally = unpack(all, units);
    if (threadIdx.x == 0) unit_item[units] = tally.items;
    __syncthreads();
    return tally;
  }

  __device__ __forceinline__ void plan() {
    const Line<Position> line = lay_out();
    const Tally all = write_units(line);
    write_workers<Position>(params, line, batch.unit_start, unit_item);
    if (threadIdx.x == 0) store(section<FmPlanHeader>(params, 0), make_header(line, all));
  }
};

__device__ __forceinline__ void plan(const FmPlanParams& params, Shared& shared) {
  Units batch(params, shared.unit_start, shared.first_unit, shared.warp_sum);
  if (params.shape.ragged) batch.read_requests();
  if (batch.units > kMostDealtUnits) return ManyPlanner(batch, shared).plan();
  if (!FewPlanner<int32_t>(batch, shared.few).plan()) plan_few_on_a_long_line(params, shared, batch.units);
}

}  // namespace by_count
}  // namespace plan
}  // namespace ferromla
