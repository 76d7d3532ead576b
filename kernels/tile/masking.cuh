// What the scores roles share: constants of the softmax, and what keeps absent and unseen tokens out of the results.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "codes.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

constexpr int kScoresBarrier = 1;  // named barrier of the scores warpgroup
constexpr float kReferenceSlack = 8.f;
constexpr float kLittle = 4.f;  // base 2: a weight of less than a sixteenth of the sum before it

constexpr float kUnset = -__FLT_MAX__;  // reference of a row without a score so far: finite, so that absent keys weigh 0 without being asked after

// What a row's score may reach before its reference becomes that score, `sum` being that of its weights so far. P is rounded, the sum
// is not: a key that counts for much must have a weight that is not rounded, 1. Others' roundings average.
__device__ __forceinline__ float reference_limit(float reference, float sum) {
  return reference + fminf(fmaxf(__log2f(sum) - kLittle, 0.f), kReferenceSlack);
}

// The largest of numbers, found in pairs, in their place: one after another each would wait for the one before.
template <int Count>
__device__ __forceinline__ float largest(float (&numbers)[Count]) {
  static_assert((Count & Count - 1) == 0);
#pragma unroll
  for (int d = 1; d < Count; d *= 2)
#pragma unroll
    for (int i = 0; i < Count; i += 2 * d) numbers[i] = fmaxf(numbers[i], numbers[i + d]);
  return numbers[0];
}

// After a wait for blocks: makes what cp.async has written visible to wgmma. TMA's writes are, and so is what stores of loading warps are
// made visible themselves.
template <class Map>
__device__ __forceinline__ void fence_copies() {
  if (Map::kTokens && !Map::kCodes && Map::kShare == 0) fence_async_shared();
}

// A wait of a whole warpgroup for a barrier. Beside a loader that computes, one warp polls for all: polls take issue slots.
template <class Map>
__device__ __forceinline__ void wait_together(uint32_t barrier, uint32_t parity, int named) {
  if (Map::kTokens) {
    if (warpgroup_thread() < 32) mbarrier_wait(barrier, parity);
    named_barrier_of_warpgroup(named);
  } else {
    mbarrier_wait(barrier, parity);
  }
}

// The tokens of the tile that exist: valid page, inside the sequence.
__device__ __forceinline__ uint64_t existing(uint64_t present, int in_sequence) {
  return in_sequence < kTileTokens ? present & ((1ull << max(in_sequence, 0)) - 1) : present;
}

// Tokens that a product of P and V takes at a time, and how many times it does for the tokens of a tile that are before the end of
// the sequence, `in_sequence` > 0 of them.
constexpr int kStepTokens = 16;
__device__ __forceinline__ int value_steps(int in_sequence) {
  return (min(in_sequence, kTileTokens) + kStepTokens - 1) / kStepTokens;
}

// Of a tile with `in_sequence` tokens before the end of the sequence: the other rows of V that are multiplied, in some of its column
// quarters, become zeros. By a warpgroup, each thread of which has the same 16 bytes of each eight rows.
template <class Map, int Quarters>
__device__ __forceinline__ void clear_past_end(int in_sequence, uint32_t smem, TilePlace<Map> place,
                                               const int (&quarters)[Quarters]) {
  const int row = warpgroup_thread() / 8 % 8;  // of eight
  for (int group = max(in_sequence - row + 7, 0) / 8; group < value_steps(in_sequence) * kStepTokens / 8; ++group)
#pragma unroll
    for (int i = 0; i < Quarters; ++i)
      store_shared(smem + block_offset(place.block(quarters[i])) + group * kGroupBytes + warpgroup_thread() * 16,
                   make_uint4(0, 0, 0, 0));
}

// Makes V safe to multiply with zero weights: rows of absent tokens become zeros; rows that some query rows of the
// block see and others do not lose their infinities and NaNs (a query row that sees such a token has a NaN weight
// already). Whole pages: those past the end are zeros already (clear_past_end).
template <class T, class Map>
__device__ __forceinline__ void clean_values(const FmDecodeParams& p, const RowBlock& r, uint8_t* smem,
                                             TilePlace<Map> place, int tile, uint64_t present) {
  const int start = tile * kTileTokens;
  present = existing(present, r.seq_len - start);
  const uint64_t seen_by_all = existing(present, r.visible(p, r.row_begin) - start);
  const int rows = Map::kTokens ? kTileTokens : min(r.seq_len - start, kTileTokens);
  // Where no page is missing they are the last ones.
  const int first = !Map::kTokens && present == existing(~0ull, rows) ? min(__popcll(seen_by_all), rows) : 0;
  // A thread has one of the 64 pieces of every other row.
  const int piece = warpgroup_thread() % 64;
  uint8_t* column = smem + block_offset(place.block(piece / 16));
#pragma unroll 1
  for (int row = first + warpgroup_thread() / 64; row < rows; row += 2) {
    if (seen_by_all >> row & 1) continue;
    uint4* at = reinterpret_cast<uint4*>(column + latent_swizzled(row, piece % 16));
    uint4 v = make_uint4(0, 0, 0, 0);
    if (present >> row & 1) {
      v = *at;
      v.x = finite_or_zero(T(), v.x), v.y = finite_or_zero(T(), v.y);
      v.z = finite_or_zero(T(), v.z), v.w = finite_or_zero(T(), v.w);
    }
    *at = v;
  }
}

// Multiplies V, which codes and powers of two made, with the mantissas of its blocks' scales where there are some. By the
// scores warpgroup when all of it has read K.
template <class Map>
__device__ __forceinline__ void scale_values(uint8_t* smem, TilePlace<Map> place) {
  const Units& units = units_of<Map>(smem);
  if (units.scaled[place.rope()] == 0) return;
  // A thread has one of the 64 pieces of every other row.
  const int piece = warpgroup_thread() % 64;
  const uint32_t column = shared_address(smem) + block_offset(place.block(piece / 16));
  const float* mantissa = units.of_tile[place.rope()].mantissa[piece / 16];
#pragma unroll 4
  for (int row = warpgroup_thread() / 64; row < kTileTokens; row += 2) {
    const uint32_t at = column + latent_swizzled(row, piece % 16);
    store_shared(at, scaled(load_shared_4(at), pack(__half(), mantissa[row], mantissa[row])));
  }
}

}  // namespace fm
