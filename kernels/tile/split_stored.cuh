// The end of a step that is stored (stored_steps.cuh), and of the last one of an item. A slot is as HalfPart has it (split_rows.cuh). A unit
// that is cut is added up as parts are (split_unit.cuh). Of a whole one of two steps a thread adds its numbers of the second, which are in
// registers, to those of the first (values.cuh), rounded and in the order in which the others would be, so that results are the same.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "shared_map.cuh"
#include "split_rows.cuh"
#include "split_steps.cuh"
#include "split_unit.cuh"
#include "stored_steps.cuh"
#include "work.cuh"

namespace fm {

// Where a thread's numbers of a quarter of the columns, or its exponents, are in the slot of `r`.
template <class Map>
__device__ __forceinline__ uint8_t* own_numbers(const FmDecodeParams& p, const RowBlock& r, int quarter) {
  const int thread = warpgroup_thread();
  return part_bytes<Map>(p, r) + (thread / 4 * HalfPart::kPieces + quarter) * kPieceBytes + thread % 4 * 16;
}
template <class Map>
__device__ __forceinline__ uint8_t* own_exponents(const FmDecodeParams& p, const RowBlock& r, int half) {
  return part_bytes<Map>(p, r) + HalfPart::scales_offset(warpgroup_thread() / 4, half, warpgroup_thread() % 4);
}

// What the numbers of this thread's two rows are multiplied with when the two steps of a whole unit are added up.
struct TwoSteps {
  float first[2], second[2], sum[2];
};

// `r`: the second.
template <class Map>
__device__ __forceinline__ TwoSteps weigh_two_steps(const FmDecodeParams& p, const RowBlock& r, int half) {
  const int lane = warpgroup_thread() % 32, own = lane % 2, row = first_row_of_pair(warpgroup_thread() / 4) + 8 * own;
  const float* lses = p.partial_lse + slot_lse<Map>(p, r, row);
  const float first = __ldcg(lses - 1), second = __ldcg(lses), top = fmaxf(fmaxf(first, second), -__FLT_MAX__);
  const float weights[2] = {exp2_approx(first - top), exp2_approx(second - top)};
  RowBlock whole = r;
  whole.slot = -1;
  const float factor = row_factor<Map>(p, whole, row, top, weights[0] + weights[1], half == 0 && lane % 4 < 2);
  const auto of = [&](float v, int h) { return __shfl_sync(~0u, v, (lane & ~1) + h); };
  return {{of(weights[0], 0), of(weights[0], 1)}, {of(weights[1], 0), of(weights[1], 1)}, {of(factor, 0), of(factor, 1)}};
}

// By both values warpgroups, when all steps of an item have been stored: of a unit that is cut, or of a whole one whose second step the
// rows of this CTA do not see.
template <class T, class Map>
__device__ __forceinline__ void add_stored_steps(const FmDecodeParams& p, int item, DecodeControl& control) {
  RowBlock r = load_row_block<Map>(p, item);
  if (r.merge < 0) {
    r.slot = first_slot_of_worker(p);
    named_barrier<kAddBarrier, 256>();
    add_parts_of_pairs<T, Map, 4>(p, r, 1, 0, kRowPairs, (block_thread() - 128) / 32);
    named_barrier<kAddBarrier, 256>();
    return;
  }
  const UnitOfSteps unit = load_unit_of_steps<Map>(p, r);
  const auto load_unit = [&] { return unit.split; };
  const auto tasks = [](int) { return kRowPairs; };
  finish_part<Map, kRowPairs>(p, load_unit, item, tasks, control, [&](RowBlock r, int, int begin, int end, int warp) {
    r.slot = unit.first_slot;
    if (unit.slots < 8)
      add_parts_of_pairs<T, Map, 4>(p, r, unit.slots, begin, end, warp);
    else
      add_parts_of_pairs<T, Map, 2>(p, r, unit.slots, begin, end, warp);
  });
}

}  // namespace fm
