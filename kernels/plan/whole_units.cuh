// Dealing few units whole, where they would be cut at even shares (dealt.h): each unit counts the longer ones, a thread per worker
// takes its units and adds them up, and all vote on whether that shares out.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "deal.cuh"
#include "dealt.h"
#include "small_shared.cuh"

namespace ferromla {
namespace plan {
namespace small {

/* Deals whole units, which have been left, if they share out that way; else nothing is written, and the answer is false. Not a
   part of `plan`, whose registers are short. */
__device__ inline __attribute__((noinline)) bool deal_whole(const FmPlanParams& params, Shared& shared, int32_t units,
                                                            Position share) {
  const FmPlanShape& shape = params.shape;
  auto& whole = shared.whole;
  const Deal deal{units, shape.workers};
  const int32_t thread = threadIdx.x, threads = blockDim.x;
  for (int32_t index = thread; index < units; index += threads) {
    const int32_t tiles = whole.tiles[index];
    const int32_t rank = rank_of(units, index, tiles, [&](int32_t i, int32_t than) { return whole.tiles[i] > than ? 1 : 0; });
    whole.rank[index] = rank;
    whole.of_rank[rank] = tiles;
  }
  __syncthreads();
  if (!deal_out(deal, shape.fixed_cost, share + shape.split_cost, whole.of_rank, whole.load)) return false;
  FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
  for (int32_t index = thread; index < units; index += threads) {
    const Parts<Position> parts{0, 0, 1, whole.tiles[index]};
    const int32_t rank = whole.rank[index];
    store(items + item_of_rank(deal, rank, whole.of_rank[rank]), make_item(whole.unit[index], parts, 0, Tally{}));
  }
  int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
  for (int32_t worker = thread; worker <= shape.workers; worker += threads) worker_begin[worker] = first_item(deal, worker);
  return true;
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
