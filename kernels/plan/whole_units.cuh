// Dealing few units whole, where they would be cut at even shares (dealt.h): each unit counts the longer ones, a thread per worker
// adds up what it would get, and all vote on whether that shares out.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "dealt.h"
#include "small_shared.cuh"

namespace ferromla {
namespace plan {
namespace small {

/* Deals whole units, which have been left, if they share out that way; else nothing is written, and the answer is false. Not a
   part of `plan`, whose registers are short. */
__device__ inline __attribute__((noinline)) bool deal_whole(const FmPlanParams& params, Shared& shared, int32_t units, Position share) {
  const FmPlanShape& shape = params.shape;
  auto& whole = shared.whole;
  const Deal deal{units, shape.workers};
  const int32_t thread = threadIdx.x, threads = blockDim.x;
  const auto rank_of = [&](int32_t index) {
    const int32_t tiles = whole.tiles[index];
    int32_t rank = 0;
#pragma unroll 8
    for (int32_t i = 0; i < units; ++i) rank += whole.tiles[i] > (i < index ? tiles - 1 : tiles);
    return rank;
  };
  const int32_t first = thread < units ? rank_of(thread) : 0;
  for (int32_t index = thread; index < units; index += threads)
    whole.by_rank[index == thread ? first : rank_of(index)] = whole.tiles[index];
  __syncthreads();
  const auto tiles = [&](int32_t rank) { return whole.by_rank[rank]; };
  bool fair = true;
  for (int32_t worker = thread; worker < shape.workers; worker += threads) fair &= load_is_fair(shape, deal, worker, share, tiles);
  if (!__syncthreads_and(fair)) return false;
  FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
  for (int32_t index = thread; index < units; index += threads) {
    const Parts<Position> parts{0, 0, 1, whole.tiles[index]};
    store(items + item_of_rank(deal, index == thread ? first : rank_of(index)), make_item(whole.unit[index], parts, 0, Tally{}));
  }
  int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
  for (int32_t worker = thread; worker <= shape.workers; worker += threads) worker_begin[worker] = first_item(deal, worker);
  return true;
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
