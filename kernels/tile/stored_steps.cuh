// How CTAs of 64 rows go through parts with steps (steps.cuh): each step of a unit has a slot, and what is in all of them is added up at
// the end (split_stored.cuh). The slots of a unit that is cut are its FmMerge's, those of a whole one its worker's: one unit after another
// takes them.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "steps.cuh"
#include "work.cuh"

namespace fm {

__device__ __forceinline__ int first_slot_of_worker(const FmDecodeParams& p) { return p.step_slots + team_index() * FM_STEPS_OF_WHOLE; }

// The step of an item that begins with a tile, and the slot that it goes to, -1 if it is all that the unit has.
__device__ __forceinline__ RowBlock step_at(const FmDecodeParams& p, const RowBlock& item, int tile) {
  RowBlock step = item;
  const int log2 = step_log2(item), number = tile >> log2;
  step.tile_begin = tile;
  step.tile_end = min(item.tile_end, number + 1 << log2);
  if (item.slot >= 0)
    step.slot = item.slot + number - (item.tile_begin >> log2);
  else if (item.slot == FM_SLOTS_OF_WORKER)
    step.slot = first_slot_of_worker(p) + number;
  return step;
}

// A part of an item that has a softmax of its own: a step where these are stored, else all of it. `tile`: its first.
template <class Map>
__device__ __forceinline__ RowBlock load_step(const FmDecodeParams& p, int item, int tile) {
  const RowBlock r = load_row_block<Map>(p, item);
  if constexpr (Map::kStoresSteps)
    return step_at(p, r, tile);
  else
    return r;
}

// Calls body(item, step, row block of the item, whether it is the last step) for each of these.
template <class Map, class Body>
__device__ __forceinline__ void for_each_step(const FmDecodeParams& p, const FirstItem& first, Body body) {
  for_each_row_block<Map>(p, first, [&](int item, const RowBlock& r) {
    if constexpr (Map::kStoresSteps) {
      int tile = r.tile_begin;
      do {
        const RowBlock whole = load_row_block<Map>(p, item), step = step_at(p, whole, tile);
        tile = step.tile_end;
        body(item, step, whole, tile >= whole.tile_end);
      } while (tile < load_row_block<Map>(p, item).tile_end);
    } else {
      body(item, r, r, true);
    }
  });
}

// Whether it is the second step of a whole unit, and so its last one.
__device__ __forceinline__ bool is_second_of_whole(const FmDecodeParams& p, const RowBlock& step) {
  return step.merge < 0 && step.slot == first_slot_of_worker(p) + 1;
}

}  // namespace fm
