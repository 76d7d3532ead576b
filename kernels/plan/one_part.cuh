// Planning for many units of which none is cut, whatever its length (one part to each): those of sparse prefill. An item is a unit
// then, so that nothing has to be added up to know its place: all blocks but the first write items, as many as there are units.
// The first one finds where workers begin, in parallel:
//
//   measure        a thread per stretch of units: costs -> scan -> where the stretch stands on the line
//   write_workers  a thread per stretch: the workers whose cuts fall on it, by going through its units again
//
// Lengths that change under a running planner give a plan for a mixture of both: which cuts fall on which stretch is known from one
// reading, and a unit of the stretch is found for each whatever the second says.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"

namespace ferromla {
namespace plan {
namespace one_part {

using Position = int64_t;

struct Shared {
  Position of_warp[kMaxWarps];
};

struct Planner {
  const FmPlanParams& params;
  const FmPlanShape& shape;
  const uint32_t units;

  __device__ __forceinline__ explicit Planner(const FmPlanParams& p) : params(p), shape(p.shape), units(p.layout.units) {}

  __device__ __forceinline__ Unit unit_at(uint32_t index) const {
    Unit unit = uniform_unit(shape, params.layout.blocks, index);
    if (shape.sparse_q_len > 0) {
      load_list_lens(params, unit);
    } else {
      unit.seq_len = load_seq_len(params, unit.request);
    }
    return unit;
  }

  __device__ __forceinline__ Position cost_of(uint32_t index) const {
    return Position{unit_tiles(shape, unit_at(index))} + shape.fixed_cost;
  }

  /* Those of blocks `block`, block + blocks and so on, of as many units as there are threads. */
  __device__ __forceinline__ void write_items(uint32_t block, uint32_t blocks) const {
    FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
    for (uint32_t index = block * blockDim.x + threadIdx.x; index < units; index += blocks * blockDim.x) {
      const Unit unit = unit_at(index);
      store(items + index, make_item(unit, Parts<Position>{0, 0, 1, unit_tiles(shape, unit)}, 0, Tally{}));
    }
  }

  /* The header, too. By a block. */
  __device__ __forceinline__ void write_workers(Shared& shared) const {
    const uint32_t stretch = (units + blockDim.x - 1) / blockDim.x;
    const uint32_t first = min(threadIdx.x * stretch, units), end = min(first + stretch, units);
    Position own = 0;
#pragma unroll 4
    for (uint32_t index = first; index < end; ++index) own += cost_of(index);
    Position total;
    const Position begin = sum_before(own, shared, total);
    const Line<Position> line{total, Divisor<Position>(even_share(total, Divisor<Position>(shape.workers))), int32_t(units), 0};
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
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

  /* What the threads before this one have, and `all` have. */
  __device__ __forceinline__ Position sum_before(Position value, Shared& shared, Position& all) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Position upto = scan(value, lane);
    if (lane == 31) shared.of_warp[warp] = upto;
    __syncthreads();
    const Position warps_upto = scan(lane < int(blockDim.x) / 32 ? shared.of_warp[lane] : 0, lane);
    const Position warps_before = __shfl_sync(~0u, warps_upto, warp == 0 ? 0 : warp - 1);
    all = __shfl_sync(~0u, warps_upto, 31);
    return (warp == 0 ? 0 : warps_before) + upto - value;
  }

  static __device__ __forceinline__ Position scan(Position value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const Position below = __shfl_up_sync(~0u, value, distance);
      if (lane >= distance) value += below;
    }
    return value;
  }
};

__device__ __forceinline__ void plan(const FmPlanParams& params, Shared& shared) {
  const Planner planner(params);
  if (blockIdx.x == 0) planner.write_workers(shared);
  if (gridDim.x == 1)
    planner.write_items(0, 1);
  else if (blockIdx.x > 0)
    planner.write_items(blockIdx.x - 1, gridDim.x - 1);
}

}  // namespace one_part
}  // namespace plan
}  // namespace ferromla
