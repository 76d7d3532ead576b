// Parts that are added up in steps (plan_layout.h): each few tiles of a part have a softmax of their own, and what they come to is
// added to what the steps before them did. So a part is the same, bit by bit, whether one CTA goes through it, which keeps the sum in
// registers (few_values.cuh), or several do, which leave each step in a slot (split_steps.cuh), and a unit whether it is cut or whole.
// CTAs of 64 rows have no registers for a sum: they leave each step in a slot, also of a whole unit (stored_steps.cuh).
//
// Steps and parts are normalised, with base-2 log-sum-exps, and added in their order. Of those so far, with m the highest log-sum-exp l:
//
//   o = sum_j 2^(l_j - m) o_j        s = sum_j 2^(l_j - m)        log-sum-exp m + log2 s
//
// Everything here is rounded as it is written: no product is fused with a sum but where fmaf says so.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/math.cuh"
#include "work.cuh"

namespace fm {

// From an item's FmWorkItem::parts.
__device__ __forceinline__ int step_log2(const RowBlock& r) { return r.parts >> 16; }
__device__ __forceinline__ int unit_parts(const RowBlock& r) { return r.parts & 0xFFFF; }
// Whether a tile of the unit is the first one of a step.
__device__ __forceinline__ bool begins_step(const RowBlock& r, int tile) { return (tile & ((1 << step_log2(r)) - 1)) == 0; }

// Whether a CTA of few rows leaves each step of an item in a slot: then several have those of a part.
__device__ __forceinline__ bool leaves_steps(const FmDecodeParams& p, const RowBlock& r) { return r.slot >= 0 && r.slot < p.step_slots; }

// What a row's numbers so far, and the next ones, are multiplied with when these are added.
struct StepFactors {
  float before, next;
};

// A row's sum of steps, or of parts, without its numbers.
struct StepSum {
  float top = -__FLT_MAX__, sum = 0.f;

  // Of the log-sum-exp of the next one.
  __device__ __forceinline__ StepFactors add(float lse) {
    const float next_top = fmaxf(top, lse);
    const StepFactors factors{exp2_approx(top - next_top), exp2_approx(lse - next_top)};
    top = next_top, sum = fmaf(sum, factors.before, factors.next);
    return factors;
  }
};

// The log-sum-exp, base 2, of what has been added up, and what normalises it.
template <class Map>
__device__ __forceinline__ float lse_of_sum(float top, float sum) {
  return sum == 0.f ? kNegInf : log2_sum<Map>(top, sum);
}
template <class Map>
__device__ __forceinline__ float normaliser(float sum) {
  return sum == 0.f ? 0.f : inverse_of_sum<Map>(sum);
}

// A number of a sum, normalised or finished. Never a zero with a sign: it would come to another one than what is added to zero.
__device__ __forceinline__ float multiplied(float number, float by) { return __fadd_rn(__fmul_rn(number, by), 0.f); }

// A number so far and the next one.
__device__ __forceinline__ float add_step(float before, float next, StepFactors factors) {
  return fmaf(next, factors.next, __fmul_rn(before, factors.before));
}

}  // namespace fm
