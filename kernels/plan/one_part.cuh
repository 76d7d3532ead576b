// Planning for many units of which none is cut, whatever its length (one part to each), or, of equal ones, those that are left when all
// workers have as many (rest.h): those of sparse prefill. An item is a unit then, or its place follows from its number, so that nothing has
// to be added up to know it: all blocks but the first write items, as many as there are units. The first one finds where
// workers begin, in parallel:
//
//   measure        a thread per stretch of units: costs -> scan -> where the stretch stands on the line
//   write_workers  a thread per stretch: the workers whose cuts fall on it, by going through its units again
//
// Lengths that change under a running planner give a plan for a mixture of both: which cuts fall on which stretch is known from one
// reading, and a unit of the stretch is found for each whatever the second says.
//
// With FM_SPLIT_REST lengths that are not given are equal. Then workers begin where rest.h says, and nothing is measured.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "rest.h"
#include "wide_scan.cuh"

namespace ferromla {
namespace plan {
namespace one_part {

using Position = int64_t;

struct Shared {
  int64_t of_warp[kMaxWarps];
};

struct Planner {
  const FmPlanParams& params;
  const FmPlanShape& shape;
  const uint32_t units;

  __device__ __forceinline__ explicit Planner(const FmPlanParams& p) : params(p), shape(p.shape), units(p.layout.units) {}

  __device__ __forceinline__ int32_t tiles_of_unit(uint32_t index) const {
    return unit_tiles(shape, load_uniform_unit(params, index));
  }
  __device__ __forceinline__ Position cost_of(uint32_t index) const { return Position{tiles_of_unit(index)} + shape.fixed_cost; }

  __device__ __forceinline__ Line<Position> line_of(Position total) const {
    return {total, Divisor<Position>(even_share(total, Divisor<Position>(shape.workers))), int32_t(units), 0};
  }

  /* Where no unit is cut, one whose `units` are 0. */
  __device__ __forceinline__ Rest find_rest() const {
    const bool equal = params.seq_lens == nullptr && params.extra_lens == nullptr && units > 0;
    if (shape.split_mode != FM_SPLIT_REST || !equal) return {};
    return rest_of_lists(shape, units, tiles_of_unit(0));
  }

  /* The items of a unit, and its merge. */
  __device__ __forceinline__ void write_unit(const Rest& rest, uint32_t index) const {
    FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
    const Unit unit = load_uniform_unit(params, index);
    const int32_t rank = static_cast<int32_t>(index - (units - rest.units));
    if (rank < 0 || rest.units == 0) {
      const int32_t item = rest.units == 0 ? index : rest.item_of_whole(index);
      return store(items + item, make_item(unit, Parts<Position>{0, 0, 1, unit_tiles(shape, unit)}, 0, Tally{}));
    }
    const Parts<Position> parts{0, rest.step, rest.count, rest.tiles};
    for (int32_t j = 0; j < rest.count; ++j) {
      store(items + rest.item_of_part(rank * rest.count + j), make_item(unit, parts, j, rest.before(rank)));
    }
    store(section<FmMerge>(params, params.layout.merges) + rank, make_merge(unit, parts, rest.before(rank)));
  }

  /* Those of blocks `block`, block + blocks and so on, of as many units as there are threads. */
  __device__ __forceinline__ void write_items(const Rest& rest, uint32_t block, uint32_t blocks) const {
    for (uint32_t index = block * blockDim.x + threadIdx.x; index < units; index += blocks * blockDim.x) write_unit(rest, index);
  }

  /* The header and workers of units some of which are cut. */
  __device__ __forceinline__ void write_workers(const Rest& rest) const {
    plan::write_workers(params, [&](int32_t worker) { return rest.first_item(worker); });
    if (threadIdx.x > 0) return;
    const Tally all{rest.first_item(shape.workers), rest.units, rest.cut()};
    store(section<FmPlanHeader>(params, 0), make_header(line_of(units * cost_of(0)), all));
  }

  /* The header, too. By a block. */
  __device__ __forceinline__ void write_workers(Shared& shared) const {
    const uint32_t stretch = (units + blockDim.x - 1) / blockDim.x;
    const uint32_t first = min(threadIdx.x * stretch, units), end = min(first + stretch, units);
    Position own = 0;
#pragma unroll 4
    for (uint32_t index = first; index < end; ++index) own += cost_of(index);
    const WideScan scanned = scan_block(own, shared.of_warp);
    const Position begin = scanned.before;
    const Line<Position> line = line_of(scanned.all);
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
    for (int32_t worker = threadIdx.x + 1; worker < shape.workers && units == 0; worker += blockDim.x) worker_begin[worker] = 0;
    if (threadIdx.x == 0) {
      store(section<FmPlanHeader>(params, 0), make_header(line, Tally{line.units, 0, 0}));
      worker_begin[0] = 0, worker_begin[shape.workers] = line.units;
    }
    /* Where stretches are empty the last of those at a position has it; the line's end belongs to the last unit. */
    const Position last = end == units && first < units ? INT64_MAX : begin + own;
    Position cut = first < end ? larger(ceil_div(begin, line.share), 1) : shape.workers;
    Span<Position> span{begin, begin};
    for (uint32_t index = first; index < end && cut < shape.workers; ++index) {
      span = {span.end, span.end + cost_of(index)};
      for (; cut < shape.workers; ++cut) {
        const Position x = smaller(cut * line.share.by, line.total);
        if (x >= last || (x >= span.end && index + 1 < end)) break;
        worker_begin[cut] = int32_t(index) + (nearer_to_end(span, x) ? 1 : 0);
      }
    }
  }
};

__device__ __forceinline__ void plan(const FmPlanParams& params, Shared& shared) {
  const Planner planner(params);
  const Rest rest = planner.find_rest();
  if (blockIdx.x == 0) {
    if (rest.units > 0)
      planner.write_workers(rest);
    else
      planner.write_workers(shared);
  }
  if (gridDim.x == 1)
    planner.write_items(rest, 0, 1);
  else if (blockIdx.x > 0)
    planner.write_items(rest, blockIdx.x - 1, gridDim.x - 1);
}

}  // namespace one_part
}  // namespace plan
}  // namespace ferromla
