// The values role for few query rows: two warpgroups accumulate O^T = V^T P^T, 256 columns of V x all rows each, and
// write the finished rows, or merge them with those of the cluster's other CTAs (merge_parts.cuh).
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/wgmma.cuh"
#include "few_softmax.cuh"
#include "last_adds.cuh"
#include "masking.cuh"
#include "merge_parts.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "split_few.cuh"
#include "split_steps.cuh"
#include "steps.cuh"
#include "work.cuh"

namespace fm {

constexpr int kValuesBarrier = 3;  // named barriers of each values warpgroup, two of them

// O += V^T P^T of one of the two blocks of 128 columns of V, of 16 tokens. The first operand is V as it lies, read with M, its columns, as the
// contiguous side.
template <class M, int Rows>
__device__ __forceinline__ void multiply_step_of_values(FewAccumulators<Rows>& o, int block, Operand values, Operand weights, int k) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
    wgmma_ss_few<1>(M(), o[2 * block + m], values.at(m * kAtomBytes + k * 2 * kGroupBytes), weights.at(k * 32), true);
}

// O += V^T P^T of one tile, or of as many steps of it. Calls used(block) when a block has been.
template <class M, int Rows, class Used>
__device__ __forceinline__ void multiply_values_weights(FewAccumulators<Rows>& o, const Operand (&values)[2], Operand weights, int steps,
                                                        Used used) {
  if (steps < kTileTokens / kStepTokens) {
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < 2; ++block) multiply_step_of_values<M, Rows>(o, block, values[block], weights, k);
      wgmma_commit();
      wgmma_wait<0>();
    }
    used(0), used(1);
    return;
  }
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int k = 0; k < kTileTokens / kStepTokens; ++k) multiply_step_of_values<M, Rows>(o, block, values[block], weights, k);
    wgmma_commit();
  }
  wgmma_wait<1>();
  used(0);
  wgmma_wait<0>();
  used(1);
}

// Multiplies each row with its factor.
template <int Rows, int Blocks>
__device__ __forceinline__ void scale_few_rows(float (&o)[Blocks][Rows / 2], const float* factors, int lane) {
  using Layout = FewLayout<Rows>;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const float factor = factors[Layout::row(c, lane)];
#pragma unroll
    for (int m = 0; m < Blocks; ++m) o[m][Layout::value(c, 0)] *= factor, o[m][Layout::value(c, 1)] *= factor;
  }
}

// Rows 8 g .. 8 g + 8 of what a thread has, of all blocks. The four lanes of a row store 32 bytes of it, eight each.
template <class T>
__device__ __forceinline__ void store_eight_rows(const FmDecodeParams& p, const RowBlock& r, int g, const float (&o)[4][4],
                                                 int half) {
  const int thread = warpgroup_thread(), lane = thread % 32;
  const int block_row = 8 * g + lane / 4, row = r.row_begin + block_row;
  const bool odd = lane & 1;  // these lanes have the upper eight columns
  const int column = half * 256 + thread / 32 * 16 + (odd ? 8 : 0) + 2 * (lane & 2);
  T* out = reinterpret_cast<T*>(p.out) + (row < r.rows ? row_offset(p, r, row, p.out_stride) : 0) + column;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const uint32_t lower = transpose_8x8(pack_result(T(), o[m][0], o[m][1]));
    const uint32_t upper = transpose_8x8(pack_result(T(), o[m][2], o[m][3]));
    const uint32_t got = __shfl_xor_sync(~0u, odd ? lower : upper, 1);
    if (row < r.rows) *reinterpret_cast<uint2*>(out + 64 * m) = odd ? make_uint2(got, upper) : make_uint2(lower, got);
  }
}

template <class T, class Map>
__device__ __forceinline__ void store_few_rows(const FmDecodeParams& p, const RowBlock& r,
                                               const FewAccumulators<Map::kRows>& o, int half) {
#pragma unroll
  for (int g = 0; g < Map::kRows / 8; ++g) {
    float of_rows[4][4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) of_rows[m][i] = o[m][4 * g + i];
    store_eight_rows<T>(p, r, g, of_rows, half);
  }
}

template <class Map>
__device__ __forceinline__ void store_few_partial(const FmDecodeParams& p, const RowBlock& r,
                                                  const FewAccumulators<Map::kRows>& o, int half) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread(), lane = thread % 32;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const int block_row = Layout::row(c, lane);
    if (r.row_begin + block_row >= r.rows) continue;
    float* out = p.partial_out + slot_row<Map>(p, r, block_row) * kLatent + half * 256 + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) out[64 * m] = o[m][Layout::value(c, 0)], out[64 * m + 8] = o[m][Layout::value(c, 1)];
  }
}

// A step's numbers to those of the steps before it; leaves zeros.
template <class Map>
__device__ __forceinline__ void add_step_to_part(FewAccumulators<Map::kRows>& part, FewAccumulators<Map::kRows>& step,
                                                 const StepControl& control, int lane) {
  using Layout = FewLayout<Map::kRows>;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const uint4 v = load_shared_4(shared_address(&control.step[Layout::row(c, lane)]));  // not before they are needed: registers
    const float4 of_row = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), 0.f);
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = Layout::value(c, h);
        part[m][i] = add_step(part[m][i], __fmul_rn(step[m][i], of_row.x), {of_row.y, of_row.z}), step[m][i] = 0.f;
      }
  }
}

// A step's numbers to its slot; leaves zeros.
template <class Map>
__device__ __forceinline__ void leave_step(const FmDecodeParams& p, const RowBlock& at, FewAccumulators<Map::kRows>& step,
                                           const StepControl& control, int lane, int half) {
  using Layout = FewLayout<Map::kRows>;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const float by = control.step[Layout::row(c, lane)].x;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) step[m][Layout::value(c, h)] = __fmul_rn(step[m][Layout::value(c, h)], by);
  }
  store_few_partial<Map>(p, at, step, half);
  clear_accumulators(step);
}

// A part's numbers when all of its steps have been added, or the finished ones of a whole unit.
template <class Map>
__device__ __forceinline__ void finish_steps(FewAccumulators<Map::kRows>& part, const StepControl& control, int lane) {
  using Layout = FewLayout<Map::kRows>;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    const int row = Layout::row(c, lane);
    const float by = control.result[row], of_row = control.step[row].w;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& number = part[m][Layout::value(c, h)];
        number = multiplied(multiplied(number, by), of_row);
      }
  }
}

// T: of the output; M: what is multiplied.
template <class T, class M, class Map>
__device__ __forceinline__ void accumulate_few_values(const FmDecodeParams& p, const FirstItem& first_item, int half,
                                                      uint32_t smem, FewControl& control) {
  const int lane = threadIdx.x % 32;
  TilePlace<Map> place;
  uint32_t result_parity = 0, parts_parity = 0;
  for_each_row_block<Map>(p, first_item, [&](int item, const RowBlock& r) {
    FewAccumulators<Map::kRows> o;
    clear_accumulators(o);
    int tiles = r.tile_end - r.tile_begin;
    [[maybe_unused]] FewAccumulators<Map::kRows> part;  // the steps so far
    [[maybe_unused]] int of_step = 0, in_slots = 0;  // tiles of a step; whether each goes to a slot
    if constexpr (Map::kSteps) {
      clear_accumulators(part);
      of_step = opaque(1 << step_log2(r)), in_slots = opaque((int)leaves_steps(p, r));
    }
    [[maybe_unused]] const int in_last_tile = Map::kSteps ? opaque(r.in_last_tile()) : 0;
    const auto last_tile = [&] { return Map::kSteps ? in_last_tile : r.in_last_tile(); };
    [[maybe_unused]] int left = of_step;
    do {
      if (LastAdds<Map>::kExists && tiles <= 1 && r.slot >= 0 && LastAdds<Map>::comes())
        control.pieces = LastAdds<Map>::come(p, item);
      if (tiles <= 0) break;
      if (!Map::kTokens && tiles == 1 && last_tile() < kTileTokens) {
        // While the scores are at it. They may still read K: scores of absent tokens are masked.
        wait_for_block<Map>(control, place, 2 * half);
        wait_for_block<Map>(control, place, 2 * half + 1);
        clear_past_end<Map>(last_tile(), smem, place, {2 * half, 2 * half + 1});
        fence_async_shared();
        named_barrier_of_warpgroup(kValuesBarrier + half);
      }
      // Found while P is waited for. That the blocks are there the scores have waited for.
      const int blocks[2] = {place.block(2 * half), place.block(2 * half + 1)};
      const auto operand = [&](int block) { return Operand(smem + block_offset(block), kAtomBytes, kGroupBytes); };
      const Operand values[2] = {operand(blocks[0]), operand(blocks[1])};
      const Operand weights(smem + Map::rope_offset(place.rope()), 0, kAtomBytes);
      wait_together<Map>(shared_address(&control.weights_full[place.rope()]), place.rope_parity(),
                         kValuesBarrier + half);
      if (control.rescale[place.rope()][0]) scale_few_rows<Map::kRows>(o, control.factor[place.rope()], lane);
      const int steps = !Map::kTokens && tiles == 1 ? value_steps(last_tile()) : kTileTokens / kStepTokens;
      multiply_values_weights<M, Map::kRows>(o, values, weights, steps, [&](int i) {
        if (!Map::kCodes && lane == 0) mbarrier_arrive(shared_address(&control.block_empty[blocks[i]]));
      });
      if (lane == 0) mbarrier_arrive(shared_address(&control.tile_empty[place.rope()]));
      place.advance();
      if constexpr (Map::kSteps) {
        if (tiles > 1 && --left > 0) continue;
        left = of_step;
        mbarrier_wait(shared_address(&control.result_full), result_parity);
        result_parity ^= 1;
        if (in_slots) {
          RowBlock at = Map::kShortOfRegisters ? load_row_block<Map>(p, item) : r;
          at.slot += (at.tile_end - tiles - at.tile_begin) >> step_log2(at);
          leave_step<Map>(p, at, o, static_cast<StepControl&>(control), lane, half);
          clear_accumulators(part);  // so that its registers are free before
        } else {
          add_step_to_part<Map>(part, o, static_cast<StepControl&>(control), lane);
        }
        if (tiles > 1) arrive_once_per_warp(shared_address(&control.result_empty));
      }
    } while (--tiles > 0);
    if constexpr (Map::kSteps) {
      if (r.empty()) {
        mbarrier_wait(shared_address(&control.result_full), result_parity);
        result_parity ^= 1;
      }
      const RowBlock end = Map::kShortOfRegisters ? load_row_block<Map>(p, item) : r;
      if (!in_slots) finish_steps<Map>(part, static_cast<StepControl&>(control), lane);
      arrive_once_per_warp(shared_address(&control.result_empty));
      if (end.slot < 0) return store_few_rows<T, Map>(p, end, part, half);
      if (last_adds<Map>(p, end))
        return finish_or_leave<Map>(p, item, part, control, [&](const RowBlock& whole, int i, const float (&numbers)[4][4]) {
          store_eight_rows<T>(p, whole, i, numbers, half);
        });
      const UnitOfSteps unit = load_unit_of_steps<Map>(p, end);  // on its way while the part is stored
      if (!in_slots || end.empty()) store_few_partial<Map>(p, end, part, half);  // zeros, where there is no step
      return finish_part_in_steps<T, Map>(p, unit, item, control);
    }
    mbarrier_wait(shared_address(&control.result_full), result_parity);
    if constexpr (kSharesTiles<Map>) {
      merge_parts<T, Map>(p, r, o, half, smem, control, parts_parity);
      if (r.slot >= 0) finish_part_of_rows<T, Map>(p, load_split_unit<Map>(p, r), item, control);
    } else {
      scale_few_rows<Map::kRows>(o, control.result, lane);
      arrive_once_per_warp(shared_address(&control.result_empty));
      if (r.slot < 0) {
        store_few_rows<T, Map>(p, r, o, half);
      } else if (LastAdds<Map>::kExists && last_adds<Map>(p, load_row_block<Map>(p, item))) {
        finish_or_leave<Map>(p, item, o, control, [&](const RowBlock& whole, int i, const float (&numbers)[4][4]) {
          store_eight_rows<T>(p, whole, i, numbers, half);
        });
      } else {
        const SplitUnit unit = load_split_unit<Map>(p, r);  // on its way while the part is stored
        store_few_partial<Map>(p, r, o, half);
        finish_part_of_rows<T, Map>(p, unit, item, control);
      }
    }
    result_parity ^= 1;
  });
  if constexpr (kSharesTiles<Map>)  // no CTA leaves while another may still read its part
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parts_parity ^ 1);
}

}  // namespace fm
