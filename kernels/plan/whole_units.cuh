// Dealing few units whole, where they would be cut at even shares (dealt.h): each unit counts the longer ones, a thread per worker
// takes its units and adds them up, and all vote on whether that shares out.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "deal.cuh"
#include "dealt.h"

namespace ferromla {
namespace plan {

struct alignas(16) WholeUnits {
  uint64_t load[2][kMostDealtWorkers];
  int32_t rank[kMostFewUnits];
  int32_t of_rank[kMostFewUnits]; /* its tiles, then who has it */
};

/* Deals `units` units, of so many tiles each, whole, if they share out that way; else nothing is written, and the answer is false.
   `unit_at(index)`: a unit. */
template <class Tiles, class UnitAt>
__device__ __forceinline__ bool deal_whole(const FmPlanParams& params, WholeUnits& whole, int32_t units, int64_t share,
                                           const Tiles& tiles_at, const UnitAt& unit_at) {
  const FmPlanShape& shape = params.shape;
  const Deal deal{units, shape.workers};
  const int32_t thread = threadIdx.x, threads = blockDim.x;
  for (int32_t index = thread; index < units; index += threads) {
    const int32_t rank = rank_of(units, index, tiles_at);
    whole.rank[index] = rank;
    whole.of_rank[rank] = tiles_at(index);
  }
  __syncthreads();
  const auto tiles_of_rank = [&whole](int32_t rank) { return whole.of_rank[rank]; };
  const auto give = [&whole](int32_t rank, int32_t, int32_t worker) { whole.of_rank[rank] = worker; };
  if (!deal_out<uint64_t>(deal, shape.fixed_cost, share + shape.split_cost, whole.load, tiles_of_rank, give)) return false;
  FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
  for (int32_t index = thread; index < units; index += threads) {
    const Parts<int32_t> parts{0, 0, 1, tiles_at(index)};
    const int32_t rank = whole.rank[index];
    store(items + first_item(deal, whole.of_rank[rank]) + rank / deal.workers, make_item(unit_at(index), parts, 0, Tally{}));
  }
  write_workers(params, [&](int32_t worker) { return first_item(deal, worker); });
  return true;
}

}  // namespace plan
}  // namespace ferromla
