// The end of a part of a unit that has been split in two, in a CTA of 64 rows. Each of the two CTAs adds up one half of the
// columns, which it has in registers: it stores the other half only, and reads this half of the other part. That is half of
// what is written and read where there are more parts (split_rows.cuh), with the same counts. A CTA that has more items does
// not wait: it stores all, and the other adds up all, and stores no half for it if it comes last.
//
// Half h of the columns is those whose accumulators have b = h (values.cuh), and is that of part h.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "shared_map.cuh"
#include "split_unit.cuh"
#include "work.cuh"

namespace fm {

constexpr uint32_t kBothHalves = 3;  // a bit each
constexpr uint32_t kNotYet = ~0u;

// What a CTA has to do for its part: store halves, say that they are there, and add up halves.
struct PartInTwo {
  SplitUnit unit;
  bool wait;  // it has nothing else to do

  __device__ __forceinline__ uint32_t own() const { return 1u << unit.part; }
  __device__ __forceinline__ uint32_t other() const { return 2u >> unit.part; }

  // By one thread, before anything is stored: both halves if the other part is there and its half has been given up.
  __device__ __forceinline__ uint32_t before_stores() const {
    const uint64_t now = unit.count.look();
    if (unit.count.there(now) == 0 || now >> 32 == 0) return kNotYet;
    unit.count.close(now);
    return kBothHalves;
  }
  // Which half to store, or both.
  __device__ __forceinline__ uint32_t stored() const { return wait ? other() : kBothHalves; }
  // By one thread, when they are stored. Returns the halves to add up, or kNotYet if it has waited for long: then its own half
  // is to be stored as well, and given up.
  __device__ __forceinline__ uint32_t arrive() const {
    fence_gpu();
    const uint64_t before = unit.count.count(wait ? 0 : own());
    uint32_t mine = own();
    if (unit.count.was_last(before))
      mine |= before >> 32, unit.count.close(before);
    else if (!wait || !unit.count.wait_for_all())
      mine = wait ? kNotYet : 0;
    return mine;
  }
  __device__ __forceinline__ uint32_t give_up() const {
    fence_gpu();
    return unit.count.give_up(own()) ? 0 : own();
  }
};

// What rows of two parts are multiplied with, by the threads of one warpgroup; `write`: and their lse.
template <class Map>
__device__ __forceinline__ void weigh_two_parts(const FmDecodeParams& p, const RowBlock& r, const RowBlock& other_part, int thread,
                                                bool write, float2* weights) {
  if (thread >= Map::kRows) return;
  const float* at = p.partial_lse + slot_lse<Map>(p, r, thread);
  const float own = __ldcg(at), other = __ldcg(at + (other_part.slot - r.slot));
  const float top = fmaxf(fmaxf(own, other), -__FLT_MAX__);
  const float2 weight = make_float2(exp2_approx(own - top), exp2_approx(other - top));
  RowBlock whole = r;
  whole.slot = -1;
  const float factor = row_factor<Map>(p, whole, thread, top, weight.x + weight.y, write);
  weights[thread] = make_float2(weight.x * factor, weight.y * factor);
}
// In the same way whichever of the two CTAs does it.
__device__ __forceinline__ float add_two(float2 weight, float own, float other) {
  return __fadd_rn(__fmul_rn(weight.x, own), __fmul_rn(weight.y, other));
}

// By both values warpgroups, the item being left. `store(r, halves)` stores halves of this part; `add(half, other_part, weigh)` adds
// up a half and calls weigh() when it has asked for the first numbers; `take_back(r)` loads the second half again.
template <class Map, class Store, class Add, class TakeBack>
__device__ __forceinline__ void finish_part_in_two(const FmDecodeParams& p, int item, WideControl& control, Store store, Add add,
                                                   TakeBack take_back) {
  const auto thread = [] { return block_thread() - 128; };
  const auto own = [&] { return left_row_block<Map>(p, control); };
  const auto part = [&] {
    const SplitUnit unit = left_split_unit(p, control);
    return PartInTwo{unit, item + 1 >= unit.next_worker};
  };
  const auto other_part = [&] {
    RowBlock r = own();
    r.slot += part().unit.part == 0 ? 1 : -1;
    return r;
  };
  const auto halves = [&](auto by_one) {
    named_barrier<kAddBarrier, 256>();
    if (thread() == 0) control.pieces = by_one();
    named_barrier<kAddBarrier, 256>();
    return control.pieces;
  };
  uint32_t mine = halves([&] { return part().before_stores(); });
#pragma unroll 1
  for (bool late = false; mine == kNotYet; late = true) {
    store(own(), late ? part().own() : part().stored());
    mine = halves([&] { return late ? part().give_up() : part().arrive(); });
  }
  const auto weigh = [&] {
    weigh_two_parts<Map>(p, own(), other_part(), thread(), mine & 1, control.part_weight);
    named_barrier<kAddBarrier, 256>();
  };
  if (mine == 2) {
    add(std::integral_constant<int, 1>(), other_part, weigh);
  } else if (mine != 0) {
    if (mine == kBothHalves) store(own(), 2);  // set aside: there are registers for one half and that of the other part
    add(std::integral_constant<int, 0>(), other_part, weigh);
    if (mine == kBothHalves) {
      take_back(own());
      add(std::integral_constant<int, 1>(), other_part, [] {});
    }
  }
  named_barrier<kAddBarrier, 256>();
}

}  // namespace fm
