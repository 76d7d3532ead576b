// Dealing parts out, by all threads of the block (dealt.h says how).
#pragma once
#include <stdint.h>

#include "../plan_algorithm.h"
#include "dealt.h"

namespace ferromla {
namespace plan {

/* Parts by rank, their tiles, become those who have them. `load`: room for what each worker has so far, its fixed costs
   included. Returns whether nobody has more than `most` in the end. Ends with a barrier. */
template <class Load>
__device__ __forceinline__ bool deal_out(const Deal& deal, int32_t fixed_cost, Load most, int32_t* of_rank,
                                         Load (*load)[kMostDealtWorkers]) {
  const int32_t workers = deal.workers, rounds = deal.rounds();
  const auto take = [&](int32_t step, int32_t turn, int32_t worker) -> Load {
    const int32_t rank = round_of_step(deal, step) * workers + turn;
    if (rank >= deal.items) return 0;
    const Load cost = Load{of_rank[rank]} + fixed_cost;
    of_rank[rank] = worker;
    return cost;
  };
  for (int32_t worker = threadIdx.x; worker < workers; worker += blockDim.x) {
    load[0][worker] = take(0, worker, worker);
    if (rounds > 1) load[0][worker] += take(1, workers - 1 - worker, worker); /* the last one has least */
  }
#pragma unroll 1
  for (int32_t step = 2; step < rounds; ++step) {
    const Load* before = load[step % 2];
    Load* after = load[(step + 1) % 2];
    __syncthreads();
    for (int32_t worker = threadIdx.x; worker < workers; worker += blockDim.x) {
      const Load own = before[worker];
      int32_t turn = 0; /* those who have less, the last one of equals first */
#pragma unroll 8
      for (int32_t other = 0; other < workers; ++other) turn += before[other] < own + (other > worker);
      after[worker] = own + take(step, turn, worker);
    }
  }
  const Load* in_the_end = load[rounds > 2 ? rounds % 2 : 0];
  bool fair = true;
  for (int32_t worker = threadIdx.x; worker < workers; worker += blockDim.x) fair &= in_the_end[worker] <= most;
  return __syncthreads_and(fair);
}

}  // namespace plan
}  // namespace ferromla
