// Planning where a thread has one or two units and 32 bits hold the line: the batches of a decode step. Everything
// that a thread finds out about its units stays in its registers, nobody searches, and what is left is a chain
// of a load, two or three block-wide steps and the stores.
//
//   read_requests  ragged only: by requests, as many to a thread: units -> scan; then each unit's request is found
//   lay_out        by units: cost -> scan -> span on the line
//   decide         cuts are evenly spaced, so a unit's thread knows which fall into its span. It says where
//                  the first of them would snap to, sees where the first cut after its own does, and all
//                  vote on whether whole units share out evenly enough
//   cut_equally    units with tiles are counted on the way: where as many could be equal, all vote on whether they are
//   deal_whole     few units that would be cut, more than workers: each counts the longer ones, and a thread per worker adds
//                  up what it would get of whole ones; all vote on whether these share out that way. Then they are written
//   cut_alike      few units of different lengths that would be cut: they are left, the length of their parts is searched for, a
//                  thread per unit counts its parts, and one per part finds its unit and writes the part
//   write_whole    an item per unit; its thread writes the workers that begin at it
//   write_cut      by units: parts -> scan -> first item, merge, cuts that snapped to the unit's
//                  ends, and the items of its inner cuts. Where some unit has many of these, units that are cut leave a record
//                  under the number of their first inner cut; the thread of an inner cut looks back to that number and writes
//                  the item that begins there
//   write_equal    a unit's thread leaves it for the threads of its parts, or writes it if it is empty; then a
//                  thread per worker writes the worker, and one per part the part
//
// Two units to a thread, in a kernel of its own: half as many warps, which barriers and scans take time for, and twice as
// many units without rounds; it takes more registers than there are with 1,024 threads (a few spills).
//
// Barriers: 3 for whole units, 4 where units are cut, 5 where one of them has many cuts; ragged, one more. One more, too, for a
// vote without equal parts.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "block.cuh"
#include "common_parts.cuh"
#include "equal_parts.h"
#include "small_shared.cuh"
#include "whole_units.cuh"

namespace ferromla {
namespace plan {
namespace small {

/* Whether the shape is within the limits of this file with so many units to a thread, up to the length of the line. All of it is
   looked at, as that takes less time than branches. */
template <int kUnits, bool kFew>
__device__ __forceinline__ bool fits(const FmPlanParams& params) {
  const FmPlanShape& shape = params.shape;
  const int32_t most = kUnits * blockDim.x;
  return (kFew | !has_few_requests(shape)) & (shape.split_mode == FM_SPLIT_AUTO) & (params.layout.units <= most) &
         ((shape.ragged == 0) | (shape.batch <= most)) & (shape.workers <= kMaxWorkers) &
         (uint32_t(shape.fixed_cost) - 1 < kMaxCost) & (uint32_t(shape.min_part) <= kMaxCost) &
         (uint32_t(shape.split_cost) <= kMaxCost);
}

/* Not a part of `plan`, whose registers are short. */
__device__ inline __attribute__((noinline)) EqualParts find_equal_parts(const FmPlanShape& shape, const Line<Position>& line,
                                                                        int32_t filled) {
  return equal_parts(shape, line, filled);
}

/* Units, of which a thread has kUnits, one after another; and as many requests of a ragged batch. */
template <int kUnits>
struct Planner {
  static_assert(kUnits <= kMostUnits);
  struct Own {
    Unit unit{};
    Span<Position> span;
    Span<Position> cuts; /* those that fall on the span, whatever becomes of them */
  };
  const FmPlanParams& params;
  const FmPlanShape& shape;
  Shared& shared;
  int32_t thread; /* its number is that of its cut, too */
  int32_t units;
  int32_t filled = 0; /* units that have tiles */
  Own own[kUnits];

  __device__ __forceinline__ Planner(const FmPlanParams& p, Shared& s)
      : params(p), shape(p.shape), shared(s), thread(threadIdx.x), units(p.layout.units) {
    if (thread < kCutWords) shared.cut_units[thread] = 0;
  }

  /* Calls f(k, index) for each unit, or request, of this thread below `count`. */
  template <class F>
  __device__ __forceinline__ void for_each(int32_t count, F f) const {
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
      if (thread * kUnits + k < count) f(k, thread * kUnits + k);
  }
  __device__ __forceinline__ bool has_tiles(int k) const { return tiles_of(shape, own[k].span) > 0; }

  __device__ __forceinline__ void read_requests() {
    Request request[kUnits] = {};
    uint32_t asked[kUnits] = {}, all = 0;
    for_each(shape.batch, [&](int k, int32_t index) {
      request[k].queries = load_query_range(params, index);
      request[k].seq_len = load_seq_len(params, index);
      constexpr uint32_t kMost = kUnits * kMaxThreads; /* overlapping ranges may ask for any number */
      const uint64_t by_range = uint64_t{static_cast<uint32_t>(blocks_of(shape, request[k].queries.len))} * shape.kv_heads;
      all += asked[k] = by_range < kMost ? by_range : kMost;
    });
    const Scanned scanned = scan_block(all, shared.warp_sum[1]);
    uint32_t before = scanned.before;
    for_each(shape.batch, [&](int k, int32_t index) {
      request[k].first_unit = before;
      before += asked[k];
      shared.requests[index] = request[k];
    });
    units = min(scanned.all, uint32_t(units));
    __syncthreads();
    const auto first_unit = [this](int32_t r) { return shared.requests[r].first_unit; };
    const auto is_of = [&](int32_t index, int32_t r) {
      return first_unit(r) <= index && (r + 1 == shape.batch || first_unit(r + 1) > index);
    };
    int32_t at = thread * kUnits; /* as it is where each request has one unit */
    for_each(units, [&](int k, int32_t index) {
      if (k > 0) at += at + 1 < shape.batch && first_unit(at + 1) <= index;
      if (at >= shape.batch || !is_of(index, at)) at = last_at_or_before(shape.batch, index, first_unit);
      const Request& found = shared.requests[at];
      own[k].unit = ragged_unit(shape, at, found.queries, found.seq_len, index - found.first_unit);
    });
  }

  __device__ __forceinline__ void read_units() {
    if (shape.ragged) return read_requests();
    for_each(units, [&](int k, int32_t index) {
      Unit& unit = own[k].unit;
      unit = uniform_unit(shape, params.layout.blocks, index);
      if (shape.sparse_q_len > 0)
        load_list_lens(params, unit);
      else
        unit.seq_len = params.seq_lens[unit.request * params.seq_lens_stride[0]]; /* clamped where it is needed */
    });
  }

  /* Returns the length of the line, or a number from kMaxLine on where it is too long. */
  __device__ __forceinline__ uint32_t lay_out() {
    uint32_t cost[kUnits] = {}, all = 0;
    for_each(units, [&](int k, int32_t) {
      Unit& unit = own[k].unit;
      unit.seq_len = clamp_seq_len(shape, unit.seq_len);
      all += cost[k] = uint32_t(unit_tiles(shape, unit)) + shape.fixed_cost;
    });
    const Scanned scanned = scan_block(min(all, kMaxLine), shared.warp_sum[0]);
    uint32_t begin = scanned.before;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      own[k].span = {Position(begin), Position(begin + cost[k])};
      begin += cost[k];
    }
    return scanned.all;
  }

  __device__ __forceinline__ void find_cuts(const Line<Position>& line) {
#pragma unroll
    for (Own& of : own) of.cuts = {ceil_div(of.span.begin, line.share), ceil_div(of.span.end, line.share)};
  }

  /* Where a cut goes when no unit is cut: to the unit's end rather than to its beginning? */
  __device__ __forceinline__ static bool snaps_to_end(const Line<Position>& line, const Own& of, Position cut) {
    return nearer_to_end(of.span, cut * line.share.by);
  }

  /* A barrier. */
  __device__ __forceinline__ void count_filled(uint32_t of_thread) {
    if (kUnits == 1) {
      filled = __syncthreads_count(of_thread > 0);
      return;
    }
    const uint32_t of_warp = __reduce_add_sync(~0u, of_thread);
    const int32_t lane = thread % 32;
    if (lane == 0) shared.filled_of_warp[thread / 32] = of_warp;
    __syncthreads();
    filled = __reduce_add_sync(~0u, lane < int32_t(blockDim.x) / 32 ? shared.filled_of_warp[lane] : 0);
  }

  template <bool kFew>
  __device__ __forceinline__ bool decide(const Line<Position>& line) {
    const bool each = has_worker_each(shape, line);
    bool first_to_end[kUnits] = {}, last_to_end[kUnits] = {};
    uint32_t own_filled = 0;
    for_each(units, [&](int k, int32_t) {
      const Own& of = own[k];
      own_filled += has_tiles(k);
      if (each || of.cuts.begin >= of.cuts.end) return;
      first_to_end[k] = snaps_to_end(line, of, of.cuts.begin);
      last_to_end[k] = snaps_to_end(line, of, of.cuts.end - 1);
      shared.snapped[of.cuts.begin] = first_to_end[k] ? of.span.end : of.span.begin;
    });
    count_filled(own_filled);
    const int64_t most = kFew ? fair_whole_stretch(shape, line, filled) : fair_uneven_stretch(shape, line.share.by, line.units);
    bool fair = true;
    for_each(units, [&](int k, int32_t) {
      const Own& of = own[k];
      if (each) fair &= of.span.end - of.span.begin <= most;
      if (each || of.cuts.begin >= of.cuts.end) return;
      const Position next = of.cuts.end * line.share.by < line.total ? shared.snapped[of.cuts.end] : line.total;
      fair &= next - (last_to_end[k] ? of.span.end : of.span.begin) <= most &&
              (first_to_end[k] || !last_to_end[k] || of.span.end - of.span.begin <= most);
    });
    return __syncthreads_and(fair);
  }

  /* Equal parts where units with tiles are equal and that is as good, else none. */
  __device__ __forceinline__ EqualParts cut_equally(const Line<Position>& line) const {
    if (!may_be_equal(shape, line, filled)) return {};
    const EqualParts equal = find_equal_parts(shape, line, filled);
    if (equal.step == 0) return equal;
    bool same = true;
    for_each(units, [&](int k, int32_t) {
      const int32_t tiles = tiles_of(shape, own[k].span);
      same &= tiles == 0 || tiles == equal.tiles;
    });
    return __syncthreads_and(same) ? equal : EqualParts{};
  }

  /* Leaves units that may be dealt whole or cut into parts of a common length. */
  __device__ __forceinline__ void leave_units() const {
    for_each(units, [&](int k, int32_t index) {
      shared.whole.unit[index] = own[k].unit;
      shared.whole.tiles[index] = tiles_of(shape, own[k].span);
    });
    __syncthreads();
  }

  __device__ __forceinline__ void write_item(int32_t item, const Unit& of, const Parts<Position>& parts, int32_t j,
                                             const Tally& before) const {
    store(section<FmWorkItem>(params, params.layout.items) + item, make_item(of, parts, j, before));
  }

  /* The workers that are left with nothing begin at the end. */
  __device__ __forceinline__ void write_idle_workers(const Line<Position>& line, int32_t items) const {
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
#pragma unroll 1
    for (int32_t cut = thread; cut <= shape.workers; cut += blockDim.x) {
      if (cut * line.share.by >= line.total) worker_begin[cut] = items;
    }
  }

  /* The first items of all units, of parts `parts`; `before` counts what comes before a unit. Where there are no more than
     `room` threads' they go by way of `staged`, which nobody else uses, 32 units of a warp at a time: then a store of the warp
     covers 512 bytes, nearly in a row, as units do not lie far apart. */
  __device__ __forceinline__ void write_first_items(FmWorkItem* staged, int32_t room, const Parts<Position> (&parts)[kUnits],
                                                    const Tally (&before)[kUnits]) const {
    if (units > room * kUnits)
      return for_each(units, [&](int k, int32_t) { write_item(before[k].items, own[k].unit, parts[k], 0, before[k]); });
    constexpr int kPieces = sizeof(FmWorkItem) / sizeof(int4), kLanes = 32 / kUnits;
    const int32_t lane = thread % 32, warp_begin = thread - lane;
    if (warp_begin * kUnits >= units) return;
    const int4* from = reinterpret_cast<const int4*>(staged + warp_begin);
    int4* to = section<int4>(params, params.layout.items);
#pragma unroll
    for (int round = 0; round < kUnits; ++round) {
      if (lane / kLanes == round)
#pragma unroll
        for (int k = 0; k < kUnits; ++k)
          store(staged + warp_begin + lane % kLanes * kUnits + k, make_item(own[k].unit, parts[k], 0, before[k]));
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int32_t piece = i * 32 + lane, of = piece / kPieces;
        int32_t place = 0;
#pragma unroll
        for (int k = 0; k < kUnits; ++k) {
          const int32_t at = __shfl_sync(~0u, before[k].items, round * kLanes + of / kUnits);
          if (of % kUnits == k) place = at;
        }
        if (warp_begin * kUnits + round * 32 + of < units) to[place * kPieces + piece % kPieces] = from[piece];
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ Tally write_whole(const Line<Position>& line) const {
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
    Parts<Position> whole[kUnits];
    Tally before[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
      whole[k] = {0, 0, 1, tiles_of(shape, own[k].span)}, before[k] = {thread * kUnits + k, 0, 0};
    write_first_items(shared.staged, kStagedItems, whole, before);
    if (has_worker_each(shape, line)) {
#pragma unroll 1
      for (int32_t cut = thread; cut <= shape.workers; cut += blockDim.x) worker_begin[cut] = unit_of_worker(shape, line, cut);
      return {units, 0, 0};
    }
    for_each(units, [&](int k, int32_t index) {
#pragma unroll 1
      for (Position cut = own[k].cuts.begin; cut < own[k].cuts.end; ++cut) {
        worker_begin[cut] = index + (snaps_to_end(line, own[k], cut) ? 1 : 0);
      }
    });
    write_idle_workers(line, units);
    return {units, 0, 0};
  }

  __device__ __forceinline__ Tally write_cut(const Line<Position>& line) {
    Parts<Position> parts[kUnits];
    Tally before[kUnits];
    /* A byte each: inner cuts, merges, and units that have many inner cuts. There are fewer cuts than workers. */
    uint32_t packed[kUnits] = {}, all_packed = 0;
#pragma unroll
    for (Parts<Position>& of : parts) of = {0, 0, 1, 0};
    for_each(units, [&](int k, int32_t) {
      parts[k] = parts_at_shares(shape, line, own[k].span);
      const int32_t inner = parts[k].count - 1;
      all_packed += packed[k] = (inner > kFewCuts ? 1u << 16 : 0) + (inner > 0 ? 1u << 8 : 0) + inner;
    });
    const Scanned scanned = scan_block(all_packed, shared.warp_sum[1]);
    const bool by_cuts = scanned.all >> 16 > 0; /* else a unit's thread writes all of it */
    uint32_t packed_before = scanned.before;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      before[k] = tally(thread * kUnits + k, packed_before);
      packed_before += packed[k];
      if (!by_cuts || parts[k].count == 1) continue;
      const Position first = first_inner_cut(shape, line, own[k].span);
      shared.of_cut.unit[first] = {own[k].unit, parts[k], before[k]};
      atomicOr(&shared.cut_units[first / 32], 1u << first % 32);
    }
    if (by_cuts) __syncthreads();
    write_first_items(shared.of_cut.staged, kStagedBesideCuts, parts, before);
    for_each(units, [&](int k, int32_t index) {
      write_snapped_cuts(line, index, own[k], parts[k], before[k]);
      if (parts[k].count > 1) {
        store(section<FmMerge>(params, params.layout.merges) + before[k].merges,
              make_merge(own[k].unit, parts[k], before[k]));
        const Position first = first_inner_cut(shape, line, own[k].span);
#pragma unroll 1
        for (int32_t j = 1; !by_cuts && j < parts[k].count; ++j) write_part(first + j - 1, {own[k].unit, parts[k], before[k]}, j);
      }
    });
#pragma unroll 1
    for (int32_t cut = thread; by_cuts && cut < shape.workers; cut += blockDim.x) write_inner_cut(cut);
    const Tally all = tally(units, scanned.all);
    write_idle_workers(line, all.items);
    return all;
  }

  __device__ __forceinline__ Tally write_equal(const EqualParts& equal) {
    const Parts<Position> parts = parts_of_filled<Position>(equal);
    for_each(units, [&](int k, int32_t index) { write_equal_unit(equal, parts, index, own[k]); });
    __syncthreads();
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
#pragma unroll 1
    for (int32_t worker = thread; worker <= shape.workers; worker += blockDim.x) worker_begin[worker] = first_item(shape, equal.turns, worker);
#pragma unroll 1
    for (int32_t part = thread; part < equal.turns.parts; part += blockDim.x) {
      const int32_t rank = part / equal.count;
      const FilledUnit& of = shared.filled_units[rank];
      const int32_t item = item_of_part(shape, equal.turns, part, of.empty_before);
      write_item(item, of.unit, parts, part - rank * equal.count, before_filled(equal, rank));
    }
    return tally_of(equal);
  }

  /* An empty unit, or the merge of another. The tiles before it say how many of those there are. */
  __device__ __forceinline__ void write_equal_unit(const EqualParts& equal, const Parts<Position>& parts, int32_t index,
                                                   const Own& of) const {
    const int32_t rank = (of.span.begin - index * shape.fixed_cost) / equal.tiles;
    if (tiles_of(shape, of.span) == 0) {
      const int32_t item = item_of_empty(shape, equal.turns, index - rank, rank * equal.count);
      return write_item(item, of.unit, Parts<Position>{0, 0, 1, 0}, 0, Tally{});
    }
    shared.filled_units[rank] = {of.unit, index - rank};
    if (equal.count == 1) return;
    store(section<FmMerge>(params, params.layout.merges) + rank, make_merge(of.unit, parts, before_filled(equal, rank)));
  }

  __device__ __forceinline__ static Tally tally(int32_t units, uint32_t packed) {
    const int32_t inner = packed & 0xff, merges = packed >> 8 & 0xff;
    return {units + inner, merges, inner + merges};
  }

  /* The workers that begin at either end of the unit because a part would become too short. */
  __device__ __forceinline__ void write_snapped_cuts(const Line<Position>& line, int32_t index, const Own& of,
                                                     const Parts<Position>& parts, const Tally& before) const {
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
#pragma unroll 1
    for (Position cut = of.cuts.begin; cut < of.cuts.end; ++cut) {
      const Cut at = cut_at_share(shape, line, index, of.span, cut, cut * line.share.by);
      if (at.part > 0) {
        cut += parts.count - 2; /* to the last inner cut */
      } else {
        worker_begin[cut] = before.items + (at.unit == index ? 0 : parts.count);
      }
    }
  }

  /* The item and the worker that begin at an inner cut. */
  __device__ __forceinline__ void write_inner_cut(int32_t cut) const {
    int32_t word = cut / 32;
    uint32_t bits = shared.cut_units[word] & ((2u << cut % 32) - 1);
    while (bits == 0 && word > 0) bits = shared.cut_units[--word];
    if (bits == 0) return;
    const int32_t first = word * 32 + 31 - __clz(bits);
    const CutUnit& of = shared.of_cut.unit[first];
    const int32_t part = cut - first + 1;
    if (part < of.parts.count) write_part(cut, of, part);
  }

  __device__ __forceinline__ void write_part(int32_t cut, const CutUnit& of, int32_t part) const {
    write_item(of.before.items + part, of.unit, of.parts, part, of.before);
    section<int32_t>(params, params.layout.worker_begin)[cut] = of.before.items + part;
  }
};

/* Units are cut where the even shares end, but into no part shorter than min_part. */
template <int kUnits>
__device__ __forceinline__ Tally write_cut_at_shares(Planner<kUnits>& planner, Line<Position>& line) {
  const Position share = cutting_share(planner.shape, line.share.by);
  if (share != line.share.by) {
    line.share = Divisor<Position>(share);
    planner.find_cuts(line);
  }
  return planner.write_cut(line);
}

/* Plans, unless the line is too long for this way: then nothing has been written, and the answer is false. kFew: the requests may be few. */
template <int kUnits, bool kFew>
__device__ __forceinline__ bool plan(const FmPlanParams& params, Shared& shared) {
  Planner<kUnits> planner(params, shared);
  planner.read_units();
  Divisor<Position> workers(params.shape.workers);
  compute_now(workers.inverse); /* while the lengths are on their way */
  const uint32_t total = planner.lay_out();
  if (total >= kMaxLine) return false;
  Line<Position> line{Position(total), Divisor<Position>(even_share(Position(total), workers)), planner.units, 1};
  planner.find_cuts(line);
  line.whole = planner.template decide<kFew>(line);
  const bool may_be_alike = kFew && may_have_common_length(params.shape, line, planner.filled);
  const EqualParts equal = planner.cut_equally(line);
  if (equal.step > 0) line.whole = 0;
  Tally all;
  if (line.whole) {
    all = planner.write_whole(line);
  } else if (equal.step > 0) {
    line.share.by = equal.step;
    all = planner.write_equal(equal);
  } else {
    bool written = false;
    if (kFew && (may_be_alike || may_be_dealt_whole(params.shape, line.units))) {
      planner.leave_units();
      const CommonParts common = may_be_alike ? cut_alike(params, shared, line) : CommonParts{};
      written = common.longest > 0;
      if (written) {
        line.share.by = common.longest;
        all = common.all;
      } else if (may_be_dealt_whole(params.shape, line.units)) {
        written = deal_whole(params, shared, line.units, line.share.by);
        line.whole = written;
        all = {line.units, 0, 0};
      }
    }
    if (!written) all = write_cut_at_shares(planner, line);
  }
  if (threadIdx.x == 0) store(section<FmPlanHeader>(params, 0), make_header(line, all));
  return true;
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
