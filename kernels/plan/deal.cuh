// Dealing parts out, by all threads of the block (dealt.h says how).
#pragma once
#include <stdint.h>

#include "../plan_algorithm.h"
#include "dealt.h"

namespace ferromla {
namespace plan {

/* What each worker has so far, its fixed costs included, << 8, and 255 less its number: of those who have as much the last one comes first.
   Two rows in turn, with entries that are more than any for workers that there are not. */
template <class Key>
using Loads = Key (&)[2][kMostDealtWorkers];

constexpr int kTurnLanes = 4; /* that count together who comes before a worker */

/* How many of `workers` numbers, so far as they are in pieces of sixteen bytes that are this lane's, are less than `own`. */
template <class Key>
__device__ __forceinline__ int32_t count_less(const Key* numbers, int32_t workers, Key own, int32_t lane) {
  constexpr int kOfPiece = 16 / sizeof(Key);
  struct alignas(16) Piece {
    Key number[kOfPiece];
  };
  int32_t less = 0;
#pragma unroll 4
  for (int32_t first = lane * kOfPiece; first < workers; first += kTurnLanes * kOfPiece) {
    const Piece piece = *reinterpret_cast<const Piece*>(numbers + first);
#pragma unroll
    for (const Key number : piece.number) less += number < own;
  }
  return less;
}

/* Parts of `tiles_of(rank)` tiles: calls give(rank, round, worker) for each. Returns whether nobody has more than `most` in the end. Ends
   with a barrier. */
template <class Key, class Tiles, class Give>
__device__ __forceinline__ bool deal_out(const Deal& deal, int32_t fixed_cost, Key most, Loads<Key> load, const Tiles& tiles_of,
                                         const Give& give) {
  const int32_t workers = deal.workers, rounds = deal.rounds();
  const auto take = [&](int32_t step, int32_t turn, int32_t worker) -> Key {
    const int32_t round = round_of_step(deal, step), rank = round * workers + turn;
    if (rank >= deal.items) return 0;
    const Key cost = static_cast<Key>(tiles_of(rank)) + static_cast<Key>(fixed_cost);
    give(rank, round, worker);
    return cost << 8;
  };
#pragma unroll 1
  for (int32_t worker = threadIdx.x; worker < kMostDealtWorkers; worker += blockDim.x) {
    Key own = ~Key{0};
    if (worker < workers) {
      own = static_cast<Key>(kMostDealtWorkers - 1 - worker) + take(0, worker, worker);
      if (rounds > 1) own += take(1, workers - 1 - worker, worker); /* the last one has least */
    } else if (rounds > 2) {
      load[1][worker] = own;
    }
    load[0][worker] = own;
  }
  constexpr int32_t kOfWarp = 32 / kTurnLanes; /* all of which take part, or none */
  const int32_t lane = threadIdx.x % kTurnLanes, at_once = blockDim.x / kTurnLanes;
  if (rounds > 2) __syncthreads();
#pragma unroll 1
  for (int32_t step = 2; step < rounds; ++step) {
    const Key* before = load[step % 2];
    Key* after = load[(step + 1) % 2];
#pragma unroll 1
    for (int32_t worker = threadIdx.x / kTurnLanes; worker / kOfWarp * kOfWarp < workers; worker += at_once) {
      const Key own = before[worker];
      int32_t turn = count_less(before, workers, own, lane);
#pragma unroll
      for (int mask = kTurnLanes / 2; mask > 0; mask /= 2) turn += __shfl_xor_sync(~0u, turn, mask);
      if (lane == 0 && worker < workers) after[worker] = own + take(step, turn, worker);
    }
    __syncthreads();
  }
  const Key* in_the_end = load[rounds > 2 ? rounds % 2 : 0];
  bool fair = true;
#pragma unroll 1
  for (int32_t worker = threadIdx.x; worker < workers; worker += blockDim.x) fair &= in_the_end[worker] >> 8 <= most;
  return __syncthreads_and(fair);
}

}  // namespace plan
}  // namespace ferromla
