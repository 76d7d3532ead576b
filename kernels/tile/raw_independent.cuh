// Both computing warpgroups of a CTA of few raw rows, each with tiles of its own: it takes every other tile of an item, from
// Q K^T to P V of all 512 columns, and never waits for the other one before the item's end.
//
//   warpgroup 0   Q K^T of 0 | softmax of 0 | P V of 0 | Q K^T of 2 | softmax of 2 | P V of 2 | ...
//   warpgroup 1   Q K^T of 1 | softmax of 1 | P V of 1 | Q K^T of 3 | softmax of 3 | P V of 3 | ...
//
// Each has references, sums and accumulators of its own. At the end these are brought to the higher of the two references, and
// each warpgroup hands over the half of the columns that the other one stores: then all is as raw_together.cuh has it.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "few_softmax.cuh"
#include "few_values.cuh"
#include "merge_parts.cuh"
#include "raw_map.cuh"
#include "raw_products.cuh"
#include "raw_query.cuh"
#include "raw_scores.cuh"
#include "raw_values.cuh"
#include "split_few.cuh"
#include "work.cuh"

namespace fm {

// Turns scores of the tile in place `at` into P at `to`, and returns whether references have moved: then control.factor has what
// accumulators are to be multiplied with. `first`: they have to move. `added` is for add(). By the whole warpgroup; after it all of P can be
// multiplied.
template <class Map, class Control>
__device__ __forceinline__ bool weigh_own_tile(RawState<Map>& state, float (&added)[RawState<Map>::kColumns],
                                               const float (&s)[Map::kRows / 2], const OwnUnits& units, Control& control, uint32_t to,
                                               uint32_t smem, int at, int barrier, bool first) {
  bool moved = false;
#pragma unroll 1
  for (bool move = first;; move = true) {
    if (move) state.move_references(s, units, control, 0, barrier, first), moved = true;
    uint32_t weights[Map::kRows / 4];
    const bool over = state.weigh_once(weights, added, s, units, control);
    store_raw_weights<Map>(weights, to, smem, at, units);
    fence_async_shared();
    const bool any = named_barrier_any_of_warpgroup(barrier, over);
    if (moved || !any) return moved;
  }
}

// What a warpgroup's sums and accumulators of a row are to be multiplied with, so that they are relative to the higher one of both
// references. A warpgroup without a reference has only zeros.
template <class Control>
__device__ __forceinline__ float own_factor(const Control& control, int own, int row) {
  const float minus = control.own[own].row[row].y;
  return exp2_approx(fminf(minus, control.own[1 - own].row[row].y) - minus);
}

// Brings together what both warpgroups have: `o` becomes the half `own` of the columns. Leaves what finish_raw_rows does; after it
// all may read that. What is handed over lies where Q and P were: the other warpgroup may still read it.
template <class Map, class Control>
__device__ __forceinline__ void finish_independent_rows(const FmDecodeParams& p, const RowBlock& r, RawState<Map>& state,
                                                        const float (&all)[8][Map::kRows / 2], FewAccumulators<Map::kRows>& o,
                                                        uint32_t smem, Control& control, int own) {
  using Layout = FewLayout<Map::kRows>;
  constexpr int kValues = Layout::kValues, kAtOnce = 64 / Map::kRows;  // blocks that are handed over at once
  constexpr uint32_t kPieceStride = 128 * 16, kHalfBytes = kAtOnce * kValues / 4 * kPieceStride;
  static_assert(2 * kHalfBytes <= Map::kCodesOffset);
  const int thread = warpgroup_thread();
  state.leave_sums(control.own[own].warp_top);
  named_barrier<kRawBarrier, 256>();
  if (own == 0 && thread < Map::kRows) {
    const auto add = [](float a, float b) { return a + b; };
    float sum = 0.f;
    if (!r.empty())
#pragma unroll
      for (int i = 0; i < 2; ++i) sum += own_factor(control, i, thread) * state.found(control.own[i].warp_top, thread, add);
    const float reference = -fminf(control.own[0].row[thread].y, control.own[1].row[thread].y);
    leave_raw_row<Map>(p, r, thread, reference, sum, control, [&] {
      const float peak = found_peak(control.own[0], thread);
      return r.tile_end - r.tile_begin > 1 ? fmaxf(peak, found_peak(control.own[1], thread)) : peak;
    });
  }
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int i = 0; i < kValues; ++i) o[m][i] = own == 0 ? all[m][i] : all[4 + m][i];
  if (r.empty()) {  // there are no references
    named_barrier<kRawBarrier, 256>();
    return;
  }
  float factor[Layout::kColumns];  // number i of a block is in column i / 4 * 2 + i % 2
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) factor[c] = own_factor(control, own, Layout::row(c, thread % 32));
  // A thread's numbers are for the same thread of the other warpgroup.
  const uint32_t slot = smem + Map::kQueryOffset + thread * 16, from = slot + own * kHalfBytes, to = slot + (1 - own) * kHalfBytes;
#pragma unroll
  for (int first = 0; first < 4; first += kAtOnce) {
    if (first != 0) named_barrier<kRawBarrier, 256>();
#pragma unroll
    for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
      for (int i = 0; i < kValues; i += 4) {
        const auto number = [&](int j) {
          const float v = own == 0 ? all[4 + first + m][i + j] : all[first + m][i + j];
          return __float_as_uint(v * factor[i / 4 * 2 + j % 2]);
        };
        store_shared(to + (m * kValues + i) / 4 * kPieceStride, make_uint4(number(0), number(1), number(2), number(3)));
      }
    named_barrier<kRawBarrier, 256>();
#pragma unroll
    for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
      for (int i = 0; i < kValues; i += 4) {
        const uint4 v = load_shared_4(from + (m * kValues + i) / 4 * kPieceStride);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& number = o[first + m][i + j];
          number = fmaf(number, factor[i / 4 * 2 + j % 2], __uint_as_float(words[j]));
        }
      }
  }
  if (kSharesTiles<Map>) named_barrier<kRawBarrier, 256>();  // this CTA's part lies there next
}

// T: of Q and the output; M: what is multiplied.
template <class T, class M, int QkDim, class Map, class Control>
__device__ __forceinline__ void compute_independent(const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                                    Control& control) {
  const unsigned thread = block_thread();
  const auto own = [&] { return (int)(thread / 128) - 1; };
  const unsigned lane = thread % 32;
  const auto values_of = places<Map>([&](int place) { return ValuePlace<Map>(smem, place, 0, p.box_shift); });
  const auto keys_of = places<Map>([&](int place) { return KeyPlace<Map>(smem, place, p.box_shift); });
  RawPlace<Map> place;  // of the item's first tile
  uint32_t parts_parity = 0;
  QueryAhead<T, QkDim, Map> query;
  if (first.exists()) query.ask(p, first.block);
  for_each_row_block_ahead<Map, kQueryAhead<T, Map>>(p, first, [&](int item, const RowBlock& range, auto ahead) {
    RawState<Map> state;
    float all[8][Map::kRows / 2];  // unnormalised O^T, all columns
    clear_accumulators(all);
    const int tiles = range.tiles();
    const int first_shared = range.first_shared(p);
    if constexpr (kSharesTiles<Map>)  // the last item's part, which others read, lies where Q goes
      mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parts_parity ^ 1);
    if (tiles > 0) query.place(p, range, smem, control);
    auto& mine = control.own[own()];
    const auto wait_for_tile = [&](int i) {
      const RawPlace<Map> of_tile = place.plus(i);
      mbarrier_wait(shared_address(&control.tile_full[of_tile.at()]), of_tile.parity());
    };
    if (own() < tiles) wait_for_tile(own());
#pragma unroll 1
    for (int i = own(); i < tiles; i += 2) {
      const RawPlace<Map> of_tile = place.plus(i);
      const int at = of_tile.at();
      float s[Map::kRows / 2];
      const uint32_t scaled = Map::kBare ? 0 : control.scaled_tile(at);
      const OwnUnits units = load_own_units<Map>(smem, at, scaled);
      const bool masked = i >= first_shared || control.present[at] != ~0ull;
      multiply_raw_query<T, M, Map>(s, smem, control, of_tile, scaled, units, keys_of);
      if (masked) {
        mask_raw_tile<Map>(s, p, item, i, first_shared, smem, control, at, own);
        named_barrier_of_warpgroup(kOwnBarrier + own());  // V is read before the next one
      }
      const ValuePlace<Map> values = values_of(at);
      ValueCodes<Map, 8> codes(values);
      if (p.max_logits != nullptr) keep_peaks<Map>(s, mine, i < 2);
      // Two places of P in turn: before one is written again every warp has come to a barrier when it had multiplied with it.
      const int weights = own() * 2 + i / 2 % 2;
      const Operand p_at = tile_weights<Map>(smem, weights);
      float added[RawState<Map>::kColumns];
      const bool moved = weigh_own_tile<Map>(state, added, s, units, mine, Map::weights(smem, weights), smem, at,
                                              kOwnBarrier + own(), i < 2);
      if (moved && i >= 2) scale_few_rows<Map::kRows>(all, mine.factor[0], lane);  // its first tile is added to nothing
      const auto used = [&] {
        if (lane == 0) mbarrier_arrive(shared_address(&control.tile_empty[at]));
        if (i + 2 < tiles) wait_for_tile(i + 2);  // while the last products are made
      };
      if (Map::kMayBePlain && control.format[at] == FM_KV_FP8_V4)
        multiply_raw_values<M, Map, Map::kMayBePlain>(all, values, codes, p_at, used);
      else
        multiply_raw_values<M, Map, false>(all, values, codes, p_at, used);
      state.add(added);
    }
    place = place.plus(tiles);
    const RowBlock r = load_row_block<Map>(p, item);
    query.forget();
    ahead([&](const RowBlock& next) { query.ask(p, next); });
    int come = 0;
    if constexpr (LastAdds<Map>::kExists)
      if (r.slot >= 0 && LastAdds<Map>::comes()) come = LastAdds<Map>::come(p, r.merge, r.parts);
    FewAccumulators<Map::kRows> o;
    finish_independent_rows<Map>(p, r, state, all, o, smem, control, own());
    finish_few_raw_rows<T, Map>(p, r, item, o, own, smem, control, come, parts_parity);
  });
  if constexpr (kSharesTiles<Map>)  // no CTA leaves while another may still read its part
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parts_parity ^ 1);
}

}  // namespace fm
