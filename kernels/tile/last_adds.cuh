// The end of a part of a unit of 16 or 32 rows that has been split into few parts (kMostLast at most). The CTAs that come to their
// last tile before the others leave their parts and go on; the last one, when those are there, adds them to what it has in
// registers: it stores no part, and finishes the rows as those of a whole unit. Nobody waits for a CTA that waits, or that is
// still at its tiles.
//
// A slot has the numbers as the threads of both values warpgroups hold them.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "few_softmax.cuh"
#include "merge_parts.cuh"
#include "shared_map.cuh"
#include "split_unit.cuh"
#include "steps.cuh"
#include "work.cuh"

namespace fm {

constexpr int kMostLast = FM_FEW_PARTS;  // parts

template <class Map>
struct LastAdds {
  static constexpr bool kExists = Map::kFewRows && !kSharesTiles<Map> && (Map::kRaw || !Map::kCodes);  // the last are short of registers
  static constexpr bool kAhead = Map::kRows == 16;  // numbers are asked for before weights are known
  static constexpr int kAtOnce = kAhead && Map::kRaw ? 2 : 1;  // pairs of columns that are under way
  // Parts are stored for the L2 to keep them until they are added up, and discarded then, where they are whole lines, so that they are not
  // written to memory (docs/tried-ends.md, "What the L2 keeps"). For others registers are short, or it gives nothing.
  static constexpr bool kDiscards = !Map::kRaw && !Map::kTokens;

  // Whether it is for a unit of so many parts, two at least, where clusters share none.
  static __device__ __forceinline__ bool is_for(int parts) { return kExists && parts <= kMostLast; }
  // The thread that says so for its CTA.
  static __device__ __forceinline__ bool comes() { return block_thread() == 128; }
  // When little is left to do of a part: how many have come before.
  static __device__ __forceinline__ int come(const FmDecodeParams& p, int merge, int parts) {
    return is_for(parts) ? atomic_add(&p.merges[merge].come, 1) : 0;
  }
  static __device__ __forceinline__ int come(const FmDecodeParams& p, int item) {
    const int4 v = load_once(reinterpret_cast<const int4*>(&p.items[item].slot));  // slot, merge, main_len, parts
    if constexpr (Map::kSteps)
      return v.x < p.step_slots ? 0 : come(p, v.y, v.w & 0xFFFF);
    else
      return come(p, v.y, v.w);
  }
  static __device__ __forceinline__ int* there(const FmDecodeParams& p, const RowBlock& r) { return &p.merges[r.merge].there; }
};

// Whether it is for the unit of a part.
template <class Map>
__device__ __forceinline__ bool last_adds(const FmDecodeParams& p, const RowBlock& r) {
  if constexpr (Map::kSteps)
    return !leaves_steps(p, r) && LastAdds<Map>::is_for(unit_parts(r));
  else
    return LastAdds<Map>::is_for(r.parts);
}

// What the parts of rows are multiplied with, by the threads of one warpgroup, and the rows' lse. `first`: the unit's first part.
template <class Map>
__device__ __forceinline__ void weigh_few_parts(const FmDecodeParams& p, const RowBlock& first, int thread, FewControl& control) {
  if (thread >= Map::kRows) return;
  const float* of_part = p.partial_lse + slot_lse<Map>(p, first, thread);
  const auto lse = [&](int k) { return k < first.parts ? __ldcg(of_part + k) : kNegInf; };
  const float3 all = make_float3(lse(0), lse(1), lse(2));
  RowBlock whole = first;
  whole.slot = -1;
  if constexpr (Map::kSteps) {
    StepSum unit;
    unit.add(all.x);
    const StepFactors second = unit.add(all.y), third = first.parts == 2 ? StepFactors{1.f, 0.f} : unit.add(all.z);
    static_cast<StepControl&>(control).part_factors[thread] = make_float4(second.before, second.next, third.before, third.next);
    control.part_weight[thread].x = row_factor<Map>(p, whole, thread, unit.top, unit.sum);
    return;
  }
  const float top = fmaxf(fmaxf(fmaxf(all.x, all.y), all.z), -__FLT_MAX__);
  const float3 weight = make_float3(exp2_approx(all.x - top), exp2_approx(all.y - top), exp2_approx(all.z - top));
  const float factor = row_factor<Map>(p, whole, thread, top, weight.x + weight.y + weight.z);
  control.part_weight[thread] = make_float3(weight.x * factor, weight.y * factor, weight.z * factor);
}
// Products are rounded before they are added, in the order of the parts: in the same way whoever does it.
__device__ __forceinline__ float add_few(float3 weight, float first, float second, float third) {
  return __fadd_rn(__fadd_rn(__fmul_rn(weight.x, first), __fmul_rn(weight.y, second)), __fmul_rn(weight.z, third));
}

// A row's parts. Where they have steps, as split_steps.cuh adds them up.
template <class Map>
struct FewParts {
  float3 weight;
  float4 factors;

  __device__ __forceinline__ FewParts(const FewControl& control, int row) : weight(control.part_weight[row]) {
    if constexpr (Map::kSteps) factors = static_cast<const StepControl&>(control).part_factors[row];
  }
  __device__ __forceinline__ float add(float first, float second, float third) const {
    if constexpr (Map::kSteps)
      return multiplied(add_step(add_step(first, second, {factors.x, factors.y}), third, {factors.z, factors.w}), weight.x);
    else
      return add_few(weight, first, second, third);
  }
};

// This thread's numbers of a part, in its slot: block_thread() - 128 is `thread`.
template <class Map>
__device__ __forceinline__ float4* numbers_of_part(const FmDecodeParams& p, const RowBlock& of, int thread) {
  return reinterpret_cast<float4*>(p.partial_out + slot_row<Map>(p, of, 0) * kLatent) + thread;
}

// Leaves a part for the CTA that comes last.
template <class Map>
__device__ __forceinline__ void leave_for_last(const FmDecodeParams& p, const RowBlock& r, const FewAccumulators<Map::kRows>& o,
                                               int thread) {
  using Last = LastAdds<Map>;
  float4* to = numbers_of_part<Map>(p, r, thread);
#pragma unroll
  for (int i = 0; i < FewLayout<Map::kRows>::kColumns / 2; ++i)
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* v = &o[m][4 * i];
      const float4 numbers = make_float4(v[0], v[1], v[2], v[3]);
      if constexpr (Last::kDiscards)
        store_kept(to + (i * 4 + m) * 256, numbers);
      else
        to[(i * 4 + m) * 256] = numbers;
    }
  named_barrier<kAddBarrier, 256>();
  if (thread == 0) {
    fence_gpu();
    atomic_add(Last::there(p, r), 1);
  }
}

// By both values warpgroups, `o` being normalised and control.pieces what come() has returned. `store(r, i, numbers)` stores finished
// numbers: those of all blocks that the thread has in columns 2 i and 2 i + 1 of its accumulators.
template <class Map, class Store>
__device__ __forceinline__ void finish_or_leave(const FmDecodeParams& p, int item, const FewAccumulators<Map::kRows>& o,
                                                FewControl& control, Store store) {
  using Last = LastAdds<Map>;
  using Layout = FewLayout<Map::kRows>;
  constexpr int kColumnPairs = Layout::kColumns / 2;
  RowBlock r = load_row_block<Map>(p, item);  // registers are short before
  if constexpr (Map::kSteps) r.parts = unit_parts(r);
  const int thread = block_thread() - 128, lane = thread % 32;
  named_barrier<kAddBarrier, 256>();
  if (control.pieces + 1 < r.parts) return leave_for_last<Map>(p, r, o, thread);
  RowBlock first = r;
  first.slot = __ldcg(&p.merges[r.merge].first_slot);
  const int own = r.slot - first.slot;
  if (lane == 0) {
    while (load_acquire(Last::there(p, r)) + 1 < r.parts) {
    }
  }
  __syncwarp();
  const auto weigh = [&] {
    weigh_few_parts<Map>(p, first, thread, control);
    named_barrier<kAddBarrier, 256>();
    if (thread == 0) p.merges[r.merge].come = 0, *Last::there(p, r) = 0;
  };
  if (!Last::kAhead) weigh();
  float4* parts = numbers_of_part<Map>(p, first, thread);
  const int others[2] = {own == 0, r.parts == 2 ? -1 : own == 2 ? 1 : 2};
#pragma unroll
  for (int base = 0; base < kColumnPairs; base += Last::kAtOnce) {
    float4 v[2][Last::kAtOnce][4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (others[k] >= 0)
#pragma unroll
        for (int i = 0; i < Last::kAtOnce; ++i)
#pragma unroll
          for (int m = 0; m < 4; ++m)
            v[k][i][m] = __ldcg(parts + others[k] * (Map::kRows * kLatent / 4) + ((base + i) * 4 + m) * 256);
    if (Last::kAhead && base == 0) weigh();
#pragma unroll
    for (int i = 0; i < Last::kAtOnce; ++i) {
      const int c = 2 * (base + i);
      const FewParts<Map> of_row[2] = {{control, Layout::row(c, lane)}, {control, Layout::row(c + 1, lane)}};
      float numbers[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float a[4] = {v[0][i][m].x, v[0][i][m].y, v[0][i][m].z, v[0][i][m].w};
        const float b[4] = {v[1][i][m].x, v[1][i][m].y, v[1][i][m].z, v[1][i][m].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float mine = o[m][Layout::value(c, 0) + j];
          numbers[m][j] = of_row[j % 2].add(own == 0 ? mine : a[j], own == 0 ? a[j] : own == 1 ? mine : b[j],
                                            own == 2 ? mine : b[j]);
        }
      }
      store(r, base + i, numbers);
    }
    if constexpr (Last::kDiscards) {
      __syncwarp();  // all lanes have read the lines
      if (lane % 8 == 0 && parts_are_lines(p))
#pragma unroll
        for (int k = 0; k < 2; ++k)
          if (others[k] >= 0)
#pragma unroll
            for (int m = 0; m < 4 * Last::kAtOnce; ++m)
              discard_line(parts + others[k] * (Map::kRows * kLatent / 4) + (base * 4 + m) * 256);
    }
  }
}

}  // namespace fm
