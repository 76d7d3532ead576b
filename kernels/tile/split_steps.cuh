// How a unit whose parts have steps (steps.cuh) is added up: from its parts, or from the steps of all of them. A slot has the rows one after
// another, as split_few.cuh has it, and split_unit.cuh has the rest.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "last_adds.cuh"
#include "shared_map.cuh"
#include "split_unit.cuh"
#include "steps.cuh"
#include "work.cuh"

namespace fm {

// A lane's columns of a row: where a unit has more parts, and so a CTA fewer rows to add up, fewer, for all warps to have some.
template <class Map, int Columns>
struct StepReads {
  static constexpr int kColumns = Columns;
  static constexpr int kAtOnce = Map::kShortOfRegisters ? (Columns == 4 ? 4 : 8 / Columns) : Columns == 4 ? 8 : 16 / Columns;  // slots under way
  static constexpr int kOfRow = kLatent / (32 * Columns);  // tasks of a row
  using Numbers = std::conditional_t<Columns == 4, float4, std::conditional_t<Columns == 2, float2, float>>;
};

// Some columns of a row.
template <int Columns>
struct StepColumns {
  float of[Columns] = {};

  // Of a sum, and what is next.
  __device__ __forceinline__ void add(const StepColumns& next, StepFactors factors) {
#pragma unroll
    for (int i = 0; i < Columns; ++i) of[i] = add_step(of[i], next.of[i], factors);
  }
  __device__ __forceinline__ void multiply(float by) {
#pragma unroll
    for (int i = 0; i < Columns; ++i) of[i] = multiplied(of[i], by);
  }
};

// A split unit as a CTA sees it, and what its FmMerge says of slots. `slots`: those that there is something in, at least one: where a plan
// was made of a length past the end of the block table, steps that nobody goes through leave none.
struct UnitOfSteps {
  SplitUnit split;
  int first_slot, slots, steps;
};
template <class Map>
__device__ __forceinline__ UnitOfSteps load_unit_of_steps(const FmDecodeParams& p, const RowBlock& r) {
  const FmMerge& merge = p.merges[r.merge];
  UnitOfSteps unit{load_split_unit<Map>(p, r), __ldcg(&merge.first_slot), __ldcg(&merge.slots), __ldcg(&merge.steps)};
  if (leaves_steps(p, r)) {  // all parts but the last have as many slots
    const unsigned each = ((unsigned)unit.slots + unit.split.count.parts - 1) / unit.split.count.parts;
    unit.split.part = (unsigned)unit.split.part / each;
    const int seen = r.visible(p, min(r.row_begin + Map::kRows, r.rows) - 1), of_step = kTileTokens << step_log2(r);
    unit.slots = min(unit.slots, max((seen + of_step - 1) / of_step, 1));
  }
  return unit;
}

// Adds up the slots of some columns of a row, from column `first` on, by a warp. `r`: with the first of them. `steps`: FmMerge's.
template <class T, class Map, class Reads>
__device__ __forceinline__ void add_slots_of_row(const FmDecodeParams& p, const RowBlock& r, int slots, int steps, int block_row,
                                                 int first) {
  if (r.row_begin + block_row >= r.rows) return;
  constexpr int kColumns = Reads::kColumns;
  const int lane = block_thread() % 32, column = first + lane * kColumns;
  const float* lses = p.partial_lse + slot_lse<Map>(p, r, block_row);
  const float* from = p.partial_out + slot_row<Map>(p, r, block_row) * kLatent + column;
  StepSum unit, part;
  StepColumns<kColumns> of_unit, of_part;
  int left = steps;  // of the part
#pragma unroll 1
  for (int base = 0; base < slots; base += Reads::kAtOnce) {
    const float lse_of_lane = lane < Reads::kAtOnce && base + lane < slots ? __ldcg(lses + base + lane) : kNegInf;
    typename Reads::Numbers v[Reads::kAtOnce];
#pragma unroll
    for (int i = 0; i < Reads::kAtOnce; ++i)
      if (base + i < slots)
        v[i] = __ldcg(reinterpret_cast<const typename Reads::Numbers*>(from + (uint64_t)(uint32_t)(base + i) * (Map::kRows * kLatent)));
#pragma unroll 1
    for (int i = 0; i < Reads::kAtOnce && base + i < slots; ++i) {  // one place in the code: the first number, and the others move up
      const float lse = __shfl_sync(~0u, lse_of_lane, i);
      const StepColumns<kColumns> numbers = reinterpret_cast<const StepColumns<kColumns>&>(v[0]);
#pragma unroll
      for (int k = 0; k + 1 < Reads::kAtOnce; ++k) v[k] = v[k + 1];
      if (steps == 1) {
        of_unit.add(numbers, unit.add(lse));
        continue;
      }
      of_part.add(numbers, part.add(lse));
      if (--left > 0 && base + i + 1 < slots) continue;
      of_part.multiply(normaliser<Map>(part.sum));
      of_unit.add(of_part, unit.add(lse_of_sum<Map>(part.top, part.sum)));
      part = {}, of_part = {}, left = steps;
    }
  }
  RowBlock whole = r;
  whole.slot = -1;
  of_unit.multiply(row_factor<Map>(p, whole, block_row, unit.top, unit.sum, first == 0 && lane == 0));
  T* to = reinterpret_cast<T*>(p.out) + row_offset(p, r, r.row_begin + block_row, p.out_stride) + column;
  if constexpr (kColumns == 1)
    *reinterpret_cast<uint16_t*>(to) = (uint16_t)pack_result(T(), of_unit.of[0], 0.f);
#pragma unroll
  for (int i = 0; i + 1 < kColumns; i += 2) *reinterpret_cast<uint32_t*>(to + i) = pack_result(T(), of_unit.of[i], of_unit.of[i + 1]);
}

// By both values warpgroups when their numbers have been stored. A task is what a warp adds up at once.
template <class T, class Map>
__device__ __forceinline__ void finish_part_in_steps(const FmDecodeParams& p, const UnitOfSteps& unit, int item, DecodeControl& control) {
  const auto finish = [&](auto columns) {
    using Reads = StepReads<Map, decltype(columns)::value>;
    const auto add = [&](RowBlock r, int, int begin, int end, int warp) {
      r.slot = unit.first_slot;
#pragma unroll 1
      for (int task = begin + warp; task < end; task += 8)
        add_slots_of_row<T, Map, Reads>(p, r, unit.slots, unit.steps, task / Reads::kOfRow, task % Reads::kOfRow * (kLatent / Reads::kOfRow));
    };
    finish_part<Map, kManyParts>(p, [&] { return unit.split; }, item, [](int) { return Map::kRows * Reads::kOfRow; }, control, add);
  };
  if (unit.split.count.parts < 8)
    finish(std::integral_constant<int, 4>());
  else if (unit.split.count.parts < 32)
    finish(std::integral_constant<int, 2>());
  else
    finish(std::integral_constant<int, 1>());
}

}  // namespace fm
