// The limits, the shared memory and the scan of planning with a unit to a thread (small.cuh).
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "common_parts.h"
#include "dealt.h"
#include "equal_parts.h"
#include "longest_first.cuh"
#include "whole_units.cuh"

namespace ferromla {
namespace plan {
namespace small {

constexpr int kMaxWorkers = 255;
constexpr int kCutWords = (kMaxWorkers + 1) / 32;
/* Limits that keep every product of a share below 2^31: the line in tiles, and each cost of the shape. */
constexpr uint32_t kMaxLine = 1 << 26;
constexpr uint32_t kMaxCost = 1 << 15;

using Position = int32_t;

struct Request {
  int32_t first_unit;
  QueryRange queries;
  int32_t seq_len;
};

/* A unit that is cut. */
struct CutUnit {
  Unit unit;
  Parts<Position> parts;
  Tally before;
};

/* A unit of as many tiles as others. */
struct FilledUnit {
  Unit unit;
  int32_t empty_before; /* units without tiles before it */
};

/* Lengths that are tried at once as the common one of parts, in pairs: a word has the parts of two. */
constexpr int kPairsOfLengths = 4;

constexpr int kFewCuts = 4;   /* of a unit: its thread writes them */
/* Threads whose items go to memory by way of shared memory: those of whole plans, and of others, the first ones of units. */
constexpr int kStagedItems = kMaxThreads - 64;
constexpr int kStagedBesideCuts = 640;

struct alignas(16) Shared {
  uint32_t warp_sum[2][kMaxWarps];
  uint32_t cut_units[kCutWords]; /* bit c: cut c is the first inner one of its unit */
  Position snapped[kMaxWorkers + 1];
  uint32_t parts_of_lengths[2][kPairsOfLengths][kMaxWarps]; /* of the units of a warp, in turns */
  union {
    Request requests[kMaxThreads];
    FmWorkItem staged[kStagedItems];
    struct {
      CutUnit unit[kMaxWorkers + 1]; /* by first inner cut */
      FmWorkItem staged[kStagedBesideCuts];
    } of_cut;
    FilledUnit filled_units[kMostRounds * kMaxWorkers];
    struct {
      Unit unit[kMostFewUnits];
      int32_t tiles[kMostFewUnits];
      uint32_t before[kMostFewUnits]; /* a packed CommonTally */
      WholeUnits dealt;
      DealingOut<kMostFewUnits> dealing;
    } whole; /* units that may be dealt out or cut into parts of a common length */
  };
};

/* How many of the units that have been left have tiles: counted again, as nobody has a register for it. */
__device__ __forceinline__ int32_t count_filled(const Shared& shared, int32_t units) {
  int32_t filled = 0;
#pragma unroll 1
  for (int32_t first = 0; first < units; first += blockDim.x) {
    const int32_t index = first + threadIdx.x;
    filled += __syncthreads_count(index < units && shared.whole.tiles[index] > 0);
  }
  return filled;
}

struct Scanned {
  uint32_t before; /* sum over the threads before this one */
  uint32_t all;
};

/* Of values up to kMaxLine. A sum that is larger may be given as anything from kMaxLine on; then `before` means
   nothing. Calls alternate between two rows of `warp_sum`, so the barrier of one call also ends the reads of the
   call before it. */
__device__ __forceinline__ Scanned scan_block(uint32_t value, uint32_t* warp_sum) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t upto = scan_warp(value); /* < 2^32 */
  if (lane == 31) warp_sum[warp] = min(upto, kMaxLine);
  __syncthreads();
  const uint32_t sum = lane < blockDim.x / 32 ? warp_sum[lane] : 0;
  const uint32_t warps_before = __reduce_add_sync(~0u, lane < warp ? sum : 0);
  return {warps_before + upto - value, __reduce_add_sync(~0u, sum)};
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
