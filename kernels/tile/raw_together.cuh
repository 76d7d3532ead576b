// Both computing warpgroups of a CTA of raw rows, at every tile together: each the scores of every other tile, and of all tiles the products with
// its half of V's columns. Where Map::kIndependent, raw_independent.cuh instead.
//
//   warpgroup 0   Q K^T of 0 | softmax of 0 | P V of 0 | Q K^T of 2 | P V of 1 | softmax of 2 | P V of 2 | Q K^T of 4 ...
//   warpgroup 1   Q K^T of 1 | P V of 0 | softmax of 1 | P V of 1 | Q K^T of 3 | P V of 2 | softmax of 3 ...
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "few_softmax.cuh"
#include "few_values.cuh"
#include "last_adds.cuh"
#include "raw_map.cuh"
#include "raw_products.cuh"
#include "raw_query.cuh"
#include "raw_scores.cuh"
#include "raw_values.cuh"
#include "split_rows.cuh"
#include "split_unit.cuh"
#include "work.cuh"

namespace fm {

// The softmax of this warpgroup's tile `i` of an item, in place `at`: leaves its P for both. `own()`: the warpgroup.
template <class Map, class Control, class Own>
__device__ __forceinline__ void leave_weights(const FmDecodeParams& p, RawState<Map>& state, const float (&s)[Map::kRows / 2],
                                              const OwnUnits& units, int i, int at, uint32_t smem, Control& control, Own own) {
  if (p.max_logits != nullptr) keep_peaks<Map>(s, control, i == 0);
  uint32_t weights[Map::kRows / 4];
  float added[RawState<Map>::kColumns];
  state.weigh(weights, added, s, units, control, at, kOwnBarrier + own(), i == 0);
  store_raw_weights<Map>(weights, Map::weights(smem, at), smem, at, units);
  fence_async_shared();
  arrive_once_per_warp(shared_address(&control.weights_full[at]));
  state.add(added);
}

// With 64 rows. T: of Q and the output; M: what is multiplied.
template <class T, class M, int QkDim, class Map, class Control>
__device__ __forceinline__ void compute_raw(const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                            Control& control) {
  const auto own = [] { return (unsigned)block_thread() / 128 - 1; };  // read anew each time: registers are short
  const auto lane = [] { return (unsigned)block_thread() % 32; };
  const auto keys_of = places<Map>([&](int place) { return KeyPlace<Map>(smem, place, p.box_shift); });
  RawPlace<Map> place;  // of the tile whose scores are next
  for_each_row_block<Map>(p, first, [&](int item, const RowBlock& range) {
    RawState<Map> state;
    FewAccumulators<Map::kRows> o;
    clear_accumulators(o);
    const int tiles = range.tiles();
    const int first_shared = range.first_shared(p);
    if (tiles > 0) load_raw_query<T, QkDim, Map>(p, range, smem, control);
    for (int i = 0; tiles > 0 && i <= tiles; ++i) {
      const bool scores = i % 2 == own() && i < tiles;
      float s[Map::kRows / 2];
      OwnUnits units;
      const int at = place.at();
      if (scores) {
        mbarrier_wait(shared_address(&control.tile_full[at]), place.parity());
        const uint32_t scaled = Map::kBare ? 0 : control.scaled_tile(at);
        units = load_own_units<Map>(smem, at, scaled);
        const bool masked = i >= first_shared || control.present[at] != ~0ull;
        multiply_raw_query<T, M, Map>(s, smem, control, place, scaled, units, keys_of);
        if (masked) mask_raw_tile<Map>(s, p, item, i, first_shared, smem, control, at, own);
      }
      if (i > 0) {
        const RawPlace<Map> last = place.last();
        const int before = last.at();
        mbarrier_wait(shared_address(&control.weights_full[before]), last.parity());
        // P is overwritten when both warpgroups have gone on for more than a tile from here.
        const ValuePlace<Map> values(smem, before, own(), p.box_shift);
        ValueCodes<Map, 4> codes(values);
        if (control.rescale[before][0]) {
          scale_few_rows<Map::kRows>(o, control.factor[before], lane());
          if (i % 2 == own()) state.rescale(control, before);  // that was the other warpgroup's tile
        }
        const auto used = [&] {
          const uint32_t empty = shared_address(&control.tile_empty[before]);
          if (lane() < p.multicast) mbarrier_arrive_at(empty, lane());
        };
        if (Map::kMayBePlain && own() == 1 && control.format[before] == FM_KV_FP8_V4)
          multiply_raw_values<M, Map, Map::kMayBePlain>(o, values, codes, tile_weights<Map>(smem, before), used);
        else
          multiply_raw_values<M, Map, false>(o, values, codes, tile_weights<Map>(smem, before), used);
      }
      if (scores) leave_weights<Map>(p, state, s, units, i, at, smem, control, own);
      if (i < tiles) place.advance();
    }
    const RowBlock r = load_row_block<Map>(p, item);
    finish_raw_rows<Map>(p, r, state, smem, place.at(), control, own());
    if (r.slot < 0) {
      store_raw_rows<T, Map>(p, o, own(), control);
    } else {
      store_raw_halves<Map>(p, r, o, own(), control);
      const SplitUnit unit = load_split_unit<Map>(p, r);
      finish_part_of_pairs<T, Map>(p, item, control, [&] { return unit; });
    }
  });
}

// With 32 rows, where registers allow to keep what places of all tiles have in common. While operands are fetched from registers, a third of
// the time, it seems that nothing is issued (docs/tried-loop.md, "What products take"), so that instructions count.
template <class T, class M, int QkDim, class Map, class Control>
__device__ __forceinline__ void compute_few_raw(const FmDecodeParams& p, const FirstItem& first, uint32_t smem, Control& control) {
  const unsigned thread = block_thread();
  const auto own = [&] { return thread / 128 - 1; };
  const unsigned lane = thread % 32;
  const auto values_of = places<Map>([&](int place) { return ValuePlace<Map>(smem, place, own(), p.box_shift); });
  const auto keys_of = places<Map>([&](int place) { return KeyPlace<Map>(smem, place, p.box_shift); });
  RawPlace<Map> place;  // of the item's first tile
  uint32_t parts_parity = 0;
  for_each_row_block<Map>(p, first, [&](int item, const RowBlock& range) {
    RawState<Map> state;
    FewAccumulators<Map::kRows> o;
    clear_accumulators(o);
    const int tiles = range.tiles();
    const int first_shared = range.first_shared(p);
    if constexpr (kSharesTiles<Map>)  // the last item's part, which others read, lies where Q goes
      mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parts_parity ^ 1);
    if (tiles > 0) load_raw_query<T, QkDim, Map>(p, range, smem, control);
    const auto multiply_keys = [&](float (&s)[Map::kRows / 2], OwnUnits& units, int i, RawPlace<Map> of_tile) {
      const int at = of_tile.at();
      mbarrier_wait(shared_address(&control.tile_full[at]), of_tile.parity());
      const uint32_t scaled = control.scaled_tile(at);
      units = load_own_units<Map>(smem, at, scaled);
      const bool masked = i >= first_shared || control.present[at] != ~0ull;
      multiply_raw_query<T, M, Map>(s, smem, control, of_tile, scaled, units, keys_of);
      if (masked) mask_raw_tile<Map>(s, p, item, i, first_shared, smem, control, at, own);
    };
    const auto multiply_values = [&](RawPlace<Map> of_tile, bool mine) {
      const int at = of_tile.at();
      mbarrier_wait(shared_address(&control.weights_full[at]), of_tile.parity());
      // P is overwritten when both warpgroups have gone on for more than a tile from here.
      const ValuePlace<Map> values = values_of(at);
      ValueCodes<Map, 4> codes(values);
      if (control.rescale[at][0]) {
        scale_few_rows<Map::kRows>(o, control.factor[at], lane);
        if (!mine) state.rescale(control, at);
      }
      const auto used = [&] {
        if (lane == 0) mbarrier_arrive(shared_address(&control.tile_empty[at]));
      };
      if (Map::kMayBePlain && own() == 1 && control.format[at] == FM_KV_FP8_V4)
        multiply_raw_values<M, Map, Map::kMayBePlain>(o, values, codes, tile_weights<Map>(smem, at), used);
      else
        multiply_raw_values<M, Map, false>(o, values, codes, tile_weights<Map>(smem, at), used);
    };
    if constexpr (Map::kMayBePlain) {  // two ways to multiply V: three times both is too much code
      for (int i = 0; tiles > 0 && i <= tiles; ++i) {
        const bool scores = i % 2 == own() && i < tiles;
        const RawPlace<Map> of_tile = place.plus(i);
        float s[Map::kRows / 2];
        OwnUnits units;
        if (scores) multiply_keys(s, units, i, of_tile);
        if (i > 0) multiply_values(of_tile.last(), i % 2 != own());
        if (scores) leave_weights<Map>(p, state, s, units, i, of_tile.at(), smem, control, own);
      }
    } else {
      int i = own();
#pragma unroll 1
      for (; i < tiles; i += 2) {
        const RawPlace<Map> of_tile = place.plus(i);
        float s[Map::kRows / 2];
        OwnUnits units;
        multiply_keys(s, units, i, of_tile);
        if (i > 0) multiply_values(of_tile.last(), false);
        leave_weights<Map>(p, state, s, units, i, of_tile.at(), smem, control, own);
        multiply_values(of_tile, true);
      }
      if (i == tiles && tiles > 0) multiply_values(place.plus(tiles - 1), false);
    }
    place = place.plus(tiles);
    const RowBlock r = load_row_block<Map>(p, item);
    int come = 0;
    if constexpr (LastAdds<Map>::kExists)
      if (r.slot >= 0 && LastAdds<Map>::comes()) come = LastAdds<Map>::come(p, r.merge, r.parts);
    finish_raw_rows<Map>(p, r, state, smem, place.at(), control, own());
    finish_few_raw_rows<T, Map>(p, r, item, o, own, smem, control, come, parts_parity);
  });
  if constexpr (kSharesTiles<Map>)  // no CTA leaves while another may still read its part
    mbarrier_wait_acquire_cluster(shared_address(&control.parts_empty), parts_parity ^ 1);
}

}  // namespace fm
