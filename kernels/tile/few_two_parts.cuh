// The end of a part of a unit of 16 or 32 rows that has been split in two. The first of the two CTAs to come to its last tile
// leaves its part and goes on; the second, when that is there, adds it to what it has in registers: it stores no part, and
// finishes the rows as those of a whole unit. Nobody waits for a CTA that waits.
//
// A slot has the numbers as the threads of both values warpgroups hold them.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "few_scores.cuh"
#include "merge_parts.cuh"
#include "shared_map.cuh"
#include "split_unit.cuh"
#include "two_parts.cuh"
#include "work.cuh"

namespace fm {

// Of FmMerge: `done` counts the CTAs that have come, `arrived` says that the first one's part is there.
template <class Map>
struct FewInTwo {
  static constexpr bool kAhead = !Map::kShortOfRegisters && Map::kRows == 16;
  static constexpr int kAtOnce = kAhead ? 2 : 1;  // pairs of columns that are under way

  // The thread that says so for its CTA.
  static __device__ __forceinline__ bool comes() { return block_thread() == 128; }
  // When little is left to do of a part: 0 for the first of two.
  static __device__ __forceinline__ int come(const FmDecodeParams& p, int item) {
    const int4 v = load_once(reinterpret_cast<const int4*>(&p.items[item].slot));  // slot, merge, main_len, parts
    return v.w == 2 ? atomic_add(&p.merges[v.y].done[Map::kSplits ? 0 : cta_of_team()], 1) : 0;
  }
  static __device__ __forceinline__ uint64_t* word(const FmDecodeParams& p, const RowBlock& r) {
    return reinterpret_cast<uint64_t*>(p.merges[r.merge].arrived[r.block]);
  }
};

// By both values warpgroups, `o` being normalised. `store(r, i, numbers)` stores finished numbers: those of all blocks that
// the thread has in columns 2 i and 2 i + 1 of its accumulators.
template <class Map, class Store>
__device__ __forceinline__ void finish_few_in_two(const FmDecodeParams& p, int item, const FewAccumulators<Map::kRows>& o,
                                                  FewControl& control, Store store) {
  using Two = FewInTwo<Map>;
  using Layout = FewLayout<Map::kRows>;
  constexpr int kColumnPairs = Layout::kColumns / 2;
  const RowBlock r = load_row_block<Map>(p, item);  // registers are short before
  const int thread = block_thread() - 128, lane = thread % 32;
  named_barrier<kAddBarrier, 256>();
  const bool second = control.pieces != 0;
  RowBlock from = r;
  if (second) from.slot += r.slot == __ldcg(&p.merges[r.merge].first_slot) ? 1 : -1;
  float4* part = reinterpret_cast<float4*>(p.partial_out + slot_row<Map>(p, from, 0) * kLatent) + thread;
  if (!second) {
#pragma unroll
    for (int i = 0; i < kColumnPairs; ++i)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* v = &o[m][4 * i];
        part[(i * 4 + m) * 256] = make_float4(v[0], v[1], v[2], v[3]);
      }
    named_barrier<kAddBarrier, 256>();
    if (thread == 0) {
      fence_gpu();
      atomic_add(Two::word(p, r), 1);
    }
    return;
  }
  if (lane == 0) {
    while (load_relaxed(Two::word(p, r)) == 0) {
    }
    fence_gpu();
  }
  __syncwarp();
  const auto weigh = [&] {
    weigh_two_parts<Map>(p, r, from, thread, true, control.part_weight);
    named_barrier<kAddBarrier, 256>();
    if (thread == 0) p.merges[r.merge].done[r.block] = 0, *Two::word(p, r) = 0;
  };
  if (!Two::kAhead) weigh();
#pragma unroll
  for (int first = 0; first < kColumnPairs; first += Two::kAtOnce) {
    float4 v[Two::kAtOnce][4];
#pragma unroll
    for (int i = 0; i < Two::kAtOnce; ++i)
#pragma unroll
      for (int m = 0; m < 4; ++m) v[i][m] = __ldcg(part + ((first + i) * 4 + m) * 256);
    if (Two::kAhead && first == 0) weigh();
#pragma unroll
    for (int i = 0; i < Two::kAtOnce; ++i) {
      const int c = 2 * (first + i);
      const float2 weights[2] = {control.part_weight[Layout::row(c, lane)], control.part_weight[Layout::row(c + 1, lane)]};
      float numbers[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float of_other[4] = {v[i][m].x, v[i][m].y, v[i][m].z, v[i][m].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers[m][j] = add_two(weights[j % 2], o[m][Layout::value(c, 0) + j], of_other[j]);
      }
      store(r, first + i, numbers);
    }
  }
}

}  // namespace fm
