// Planning for any number of units and any lengths, unless the mode fixes the parts of a unit (by_count.cuh): rounds of a few units per
// thread, 64-bit positions.
//
//   read_requests    ragged only: a thread per request: units -> scan -> first unit of the request
//   lay_out_units    a thread per unit: cost -> scan -> start of the unit on the work line
//   decide_cutting   a thread per worker: do whole units share out evenly enough?
//   cut_equally      where as many units with tiles could be equal, a thread per unit: are they?
//   write_units      a thread per unit: parts -> scan -> items, merge, first item of the unit
//   write_workers    a thread per cut: which item it falls on; in a cut unit, that item
//   write_common     parts of a common length, for few units of different lengths that would be cut, instead of both
//   write_equal      equal parts, instead of both: a thread per unit, then one per worker and one per part
//   deal_line_whole  few units that would be cut, whole (whole_units.cuh)
//   deal_line        few units that would be cut and are not dealt whole, in parts of an even share (longest_first.cuh)
//
// A unit's thread writes the unit's first item and a cut's thread the item that begins there, so nobody
// loops over the parts of a long request.
//
// Shared memory holds the starts and items of up to kSharedUnits units, and the first units of as many requests; those of more are in
// the scratch sections of the plan (units.cuh).
//
// Tiles are read off the line in all steps after the first, so lengths that change under a running planner
// give a plan for a mixture of both, never a write outside the layout. Query ranges are read again: each is
// clamped by itself.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "common_parts.h"
#include "equal_parts.h"
#include "longest_first.cuh"
#include "units.cuh"
#include "whole_units.cuh"

namespace ferromla {
namespace plan {
namespace large {

using Position = int64_t;

struct alignas(16) Shared {
  union {
    struct {
      Position unit_start[kSharedUnits + 1];
      int32_t unit_item[kSharedUnits + 1];
    };
    struct {
      Position start[kMostFewUnits + 2]; /* of the units that are dealt whole; an even number: what follows has entries of sixteen bytes */
      WholeUnits whole;
    };
    struct {
      Position start_of_dealt[kMostDealtOutUnits + 2]; /* of those that are dealt out */
      DealingOut<kMostDealtOutUnits> dealing;
    };
  };
  int64_t warp_sum[2][kMaxWarps];
  uint32_t filled[kMaxWarps]; /* units with tiles, by the warp that laid them out */
  int32_t first_unit[kSharedUnits];
};

struct Planner : Units {
  int32_t* unit_item;
  uint32_t* filled;

  __device__ Planner(const FmPlanParams& p, Shared& shared)
      : Units(p, shared.unit_start, shared.first_unit, shared.warp_sum), filled(shared.filled) {
    unit_item = units <= kSharedUnits ? shared.unit_item : section<int32_t>(p, p.layout.unit_item);
  }

  /* Lays the units on the line; returns its length. */
  __device__ Position lay_out_units() {
    uint32_t own_filled = 0;
    const Position total = scan_all<4>(
        units,
        [&](int32_t index, int) {
          const int32_t tiles = unit_tiles(shape, unit_at(index));
          own_filled += tiles > 0;
          return int64_t{tiles} + shape.fixed_cost;
        },
        [&](int32_t index, int, int64_t before) { unit_start[index] = before; });
    own_filled = __reduce_add_sync(~0u, own_filled);
    if (threadIdx.x % 32 == 0) filled[threadIdx.x / 32] = own_filled;
    if (threadIdx.x == 0) unit_start[units] = total;
    __syncthreads();
    return total;
  }

  /* Where worker `cut` begins, 0 <= cut <= workers. */
  __device__ Cut cut_of(const Line<Position>& line, int32_t cut) const {
    if (cut == 0 || line.units == 0) return {0, 0};
    if (cut == shape.workers) return {line.units, 0};
    if (has_worker_each(shape, line)) return {unit_of_worker(shape, line, cut), 0};
    const Position x = smaller(cut * line.share.by, line.total);
    const auto start = [this](int32_t index) { return unit_start[index]; };
    const int32_t unit = last_at_or_before(line.units, x, start);
    const Span<Position> span = span_of(unit);
    if (!line.whole) return cut_at_share(shape, line, unit, span, cut, x);
    return {unit + (nearer_to_end(span, x) ? 1 : 0), 0};
  }

  /* A worker's stretch of whole units. `line.whole` is set. */
  __device__ Position whole_stretch(const Line<Position>& line, int32_t worker) const {
    return unit_start[cut_of(line, worker + 1).unit] - unit_start[cut_of(line, worker).unit];
  }

  __device__ Line<Position> decide_cutting(Position total) {
    const Divisor<Position> workers(shape.workers);
    Line<Position> line{total, Divisor<Position>(even_share(total, workers)), int32_t(units), 1};
    const Position most = fair_whole_stretch(shape, line, all_filled());
    bool fair = true;
    for (uint32_t worker = threadIdx.x; worker < uint32_t(shape.workers); worker += blockDim.x) {
      fair = fair && whole_stretch(line, worker) <= most;
    }
    if (__syncthreads_and(fair)) return line;
    line.whole = 0;
    line.share.by = cutting_share(shape, line.share.by);
    return line;
  }

  __device__ int32_t all_filled() const {
    const uint32_t lane = threadIdx.x % 32;
    return __reduce_add_sync(~0u, lane < blockDim.x / 32 ? filled[lane] : 0);
  }

  /* Whether all units that have tiles have so many. */
  __device__ bool all_have(Position tiles) const {
    bool same = true;
    for (uint32_t index = threadIdx.x; index < units; index += blockDim.x) {
      const Position own = tiles_of(shape, span_of(index));
      same = same && (own == 0 || own == tiles);
    }
    return __syncthreads_and(same);
  }

  /* Equal parts where units with tiles are equal and that is as good, else none. */
  __device__ EqualParts cut_equally(const Line<Position>& line) const {
    if (!may_be_equal(shape, line, all_filled())) return {};
    const EqualParts equal = equal_parts(shape, line, all_filled(), best_parts);
    return equal.step > 0 && all_have(equal.tiles) ? equal : EqualParts{};
  }

  __device__ Tally write_equal(const EqualParts& equal) {
    const Parts<Position> parts = parts_of_filled<Position>(equal);
    for (uint32_t index = threadIdx.x; index < units; index += blockDim.x) write_equal_unit(equal, parts, index);
    __syncthreads();
    plan::write_workers(params, [&](int32_t worker) { return first_item(shape, equal, worker); });
    FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
    for (uint32_t i = threadIdx.x; i < uint32_t(equal.cut() * equal.count); i += blockDim.x) {
      const int32_t rank = i / equal.count, part = i % equal.count, index = unit_item[rank];
      FmWorkItem* item = items + item_of_part(shape, equal, i, index - rank);
      store(item, make_item(unit_at(index), parts, part, before_filled(equal, rank)));
    }
    return tally_of(equal);
  }

  /* An empty unit, a whole one beside others that are cut, or the merge of one of these, which `unit_item` gets by its rank. The tiles
     before a unit say how many come before that are not empty. */
  __device__ void write_equal_unit(const EqualParts& equal, const Parts<Position>& parts, int32_t index) {
    const Span<Position> span = span_of(index);
    const int32_t tiles = tiles_of(shape, span);
    const int32_t of_filled = static_cast<int32_t>((span.begin - Position{index} * shape.fixed_cost) / equal.tiles);
    const int32_t rank = of_filled - equal.whole;
    if (tiles == 0 || rank < 0) {
      const int32_t item = tiles > 0 ? item_of_whole(shape, equal, of_filled) : item_of_empty(shape, equal, index - of_filled, of_filled);
      return store(section<FmWorkItem>(params, params.layout.items) + item,
                   make_item(unit_at(index), Parts<Position>{0, 0, 1, tiles}, 0, Tally{}));
    }
    unit_item[rank] = index;
    if (equal.count == 1) return;
    FmMerge* merge = section<FmMerge>(params, params.layout.merges) + rank;
    store(merge, make_merge(unit_at(index), parts, before_filled(equal, rank)));
  }

  /* The least common length of parts with which units are no more parts than workers; 0: they are not cut this way. */
  __device__ Position common_length(const Line<Position>& line) {
    if (!may_have_common_length(shape, line, all_filled())) return 0;
    const CommonSearch<Position> search = common_search<Position>(shape, line, all_filled(), INT64_MAX - 1);
    if (search.equal > 0 && all_have(search.equal)) return 0;
    Position low = search.least, high = search.most + 1;
    while (low < high) {
      const Position middle = low + (high - low) / 2;
      int64_t parts = 0;
      for (uint32_t index = threadIdx.x; index < units; index += blockDim.x) {
        parts += parts_counted<Position>(shape, middle, (tiles_of(shape, span_of(index)) + middle - 1) / middle);
      }
      if (scan_block(parts, warp_sum[turn++ % 2]).all <= shape.workers) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low <= search.most ? low : 0;
  }

  /* Counts of a CommonTally in 20 bits each. */
  __device__ static CommonTally unpack_common(int64_t packed) {
    constexpr int32_t kBits = (1 << 20) - 1;
    return {int32_t(packed & kBits), int32_t(packed >> 20 & kBits), int32_t(packed >> 40)};
  }

  /* Writes all units, with parts no longer than `longest`. Parts are counted first: a turn depends on how many there are. */
  __device__ Tally write_common(Position longest) {
    const auto parts_at = [&](int32_t index) { return parts_up_to(shape, longest, tiles_of(shape, span_of(index))); };
    const auto count = [&](int32_t index, int) {
      const Parts<Position> parts = parts_at(index);
      return parts.tiles == 0 ? 0 : int64_t{1} << 40 | int64_t{parts.count > 1} << 20 | parts.count;
    };
    const CommonTally all = unpack_common(scan_all<1>(units, count, [](int32_t, int, int64_t) {}));
    const Turns turns{all.parts, int32_t(units) - all.filled, 1};
    FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
    scan_all<1>(units, count, [&](int32_t index, int, int64_t packed) {
      const CommonTally before = unpack_common(packed);
      const Parts<Position> parts = parts_at(index);
      const Unit unit = unit_at(index);
      const int32_t empty = index - before.filled;
      if (parts.tiles == 0) {
        return store(items + item_of_empty(shape, turns, empty, before.parts), make_item(unit, parts, 0, Tally{}));
      }
      for (int32_t j = 0; j < parts.count; ++j) {
        store(items + item_of_part(shape, turns, before.parts + j, empty), make_item(unit, parts, j, tally_of(before)));
      }
      if (parts.count == 1) return;
      store(section<FmMerge>(params, params.layout.merges) + before.cut, make_merge(unit, parts, tally_of(before)));
    });
    plan::write_workers(params, [&](int32_t worker) { return first_item(shape, turns, worker); });
    return {items_of(turns), all.cut, tally_of(all).slots};
  }

  __device__ Tally write_units(const Line<Position>& line) {
    constexpr int kUnitsToWrite = 2; /* that fit the registers */
    Parts<Position> parts[kUnitsToWrite];
    const int64_t all = scan_all<kUnitsToWrite>(
        units,
        [&](int32_t index, int slot) {
          parts[slot] = parts_of(shape, line, span_of(index));
          return pack(parts[slot]);
        },
        [&](int32_t index, int slot, int64_t before) { write_unit(index, parts[slot], unpack(before, index)); });
    const Tally tally = unpack(all, units);
    if (threadIdx.x == 0) unit_item[units] = tally.items;
    __syncthreads();
    return tally;
  }

  /* The unit's merge and its first item. */
  __device__ void write_unit(int32_t index, const Parts<Position>& parts, const Tally& before) {
    const Unit unit = unit_at(index);
    FmWorkItem* items = section<FmWorkItem>(params, params.layout.items) + before.items;
    unit_item[index] = before.items;
    store(items, make_item(unit, parts, 0, before));
    if (parts.count > 1) store(section<FmMerge>(params, params.layout.merges) + before.merges, make_merge(unit, parts, before));
  }

  __device__ void write_workers(const Line<Position>& line) const {
    plan::write_workers(params, [&](int32_t worker) {
      const Cut cut = cut_of(line, worker);
      if (cut.part > 0) write_cut_item(line, cut);
      return unit_item[cut.unit] + cut.part;
    });
  }

  /* The item that begins at a cut inside a unit. The unit's first item says where its slots begin. */
  __device__ void write_cut_item(const Line<Position>& line, Cut cut) const {
    const Parts<Position> parts = parts_of(shape, line, span_of(cut.unit));
    FmWorkItem* items = section<FmWorkItem>(params, params.layout.items) + unit_item[cut.unit];
    const Tally before{unit_item[cut.unit], items->merge, items->slot};
    store(items + cut.part, make_item(unit_at(cut.unit), parts, cut.part, before));
  }
};

/* Few units that would be cut at even shares, whole, if they share out that way: `line` is so then. Not a part of `plan`, whose registers
   are short. */
__device__ inline __attribute__((noinline)) bool deal_line_whole(const FmPlanParams& params, Shared& shared, Line<Position>& line,
                                                                 Position share) {
  if (!may_be_dealt_whole(params.shape, line.units)) return false;
  Planner planner(params, shared);
  planner.units = line.units;
  const bool dealt = deal_whole(
      params, shared.whole, line.units, share, [&](int32_t index) { return tiles_of(params.shape, planner.span_of(index)); },
      [&](int32_t index) { return planner.unit_at(index); });
  if (dealt) line.whole = 1, line.share.by = share;
  return dealt;
}

/* Few units that would be cut at even shares, in parts of one, longest first. Not a part of `plan`, either. */
__device__ inline __attribute__((noinline)) DealtParts deal_line(const FmPlanParams& params, Shared& shared, Line<Position> line,
                                                                 Position common) {
  Planner planner(params, shared);
  planner.units = line.units;
  const LongestFirst way = longest_first(params.shape, line, planner.all_filled(), common);
  return deal_longest_first(
      params, way, shared.dealing, line.units,
      [&](int32_t index) { return tiles_of(params.shape, planner.span_of(index)); },
      [&](int32_t index) { return planner.unit_at(index); });
}

__device__ __forceinline__ void plan(const FmPlanParams& params, Shared& shared) {
  Planner planner(params, shared);
  if (params.shape.ragged) planner.read_requests();
  const Position total = planner.lay_out_units();
  Line<Position> line = planner.decide_cutting(total);
  const EqualParts equal = planner.cut_equally(line);
  Tally all;
  const Position common = equal.step > 0 ? 0 : planner.common_length(line);
  if (equal.step > 0) {
    line.whole = 0;
    line.share.by = equal.step;
    all = planner.write_equal(equal);
  } else if (common == 0 && !line.whole && deal_line_whole(params, shared, line, even_share(total, Divisor<Position>(params.shape.workers)))) {
    all = {line.units, 0, 0};
  } else if (const DealtParts dealt = deal_line(params, shared, line, common); dealt.step > 0) {
    line.whole = dealt.all.merges == 0;
    line.share.by = dealt.step;
    all = dealt.all;
  } else if (common > 0) {
    line.share.by = common;
    all = planner.write_common(common);
  } else {
    all = planner.write_units(line);
    planner.write_workers(line);
  }
  if (threadIdx.x == 0) store(section<FmPlanHeader>(params, 0), make_header(line, all));
}

}  // namespace large
}  // namespace plan
}  // namespace ferromla
