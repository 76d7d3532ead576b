// Planning where a thread has a unit and 32 bits hold the line: the batches of a decode step. Everything
// that a thread finds out about its unit stays in its registers, nobody searches, and what is left is a chain
// of a load, two or three block-wide steps and the stores.
//
//   read_requests  ragged only: a thread per request: units -> scan; then each unit's request is found
//   lay_out        by units: cost -> scan -> span on the line
//   decide         cuts are evenly spaced, so a unit's thread knows which fall into its span. It says where
//                  the first of them would snap to, sees where the first cut after its own does, and all
//                  vote on whether whole units share out evenly enough
//   cut_equally    units with tiles are counted on the way: where as many could be equal, all vote on whether they are
//   deal_left_whole  few units that would be cut, more than workers: each counts the longer ones, and a thread per worker adds
//                  up what it would get of whole ones; all vote on whether these share out that way. Then they are written
//   cut_alike      few units of different lengths that would be cut: they are left, the length of their parts is searched for, a
//                  thread per unit counts its parts, and one per part finds its unit and writes the part
//   deal_left_units  what has been left and was written in neither way: in parts of an even share, longest first (longest_first.cuh)
//   write_whole    an item per unit; its thread writes the workers that begin at it
//   write_cut      by units: parts -> scan -> first item, merge, cuts that snapped to the unit's
//                  ends, and the items of its inner cuts. Where some unit has many of these, units that are cut leave a record
//                  under the number of their first inner cut; the thread of an inner cut looks back to that number and writes
//                  the item that begins there
//   write_equal    a unit's thread leaves it for the threads of its parts, or writes it if it is empty; then a
//                  thread per worker writes the worker, and one per part the part
//   write_beside_whole  the same of few units that have been left, as many whole ones to each worker and parts of the others
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
#include "longest_first.cuh"
#include "small_shared.cuh"
#include "whole_units.cuh"

namespace ferromla {
namespace plan {
namespace small {

/* Whether the shape is within the limits of this file, up to the length of the line. All of it is looked at, as that takes less time
   than branches. More than few requests that may be dealt out longest first are left to large.cuh: most of them a cluster plans. */
template <bool kFew>
__device__ __forceinline__ bool fits(const FmPlanParams& params) {
  const FmPlanShape& shape = params.shape;
  const int32_t most = blockDim.x;
  return (kFew || !(has_few_requests(shape) || may_be_dealt_out(shape, params.layout.units))) &
         (params.layout.units <= most) &
         ((shape.ragged == 0) | (shape.batch <= most)) & (shape.workers <= kMaxWorkers) &
         (uint32_t(shape.fixed_cost) - 1 < kMaxCost) & (uint32_t(shape.min_part) <= kMaxCost) &
         (uint32_t(shape.split_cost) <= kMaxCost);
}

/* best_parts, a lane for each way. */
__device__ __forceinline__ PartsAtCost best_parts_of_lanes(const FmPlanShape& shape, const WaysToCut& ways) {
  constexpr int kLanes = 8;
  static_assert(kWaysToCut <= kLanes, "a lane for each");
  const int32_t lane = threadIdx.x % kLanes, way = ways.has(lane) ? lane : 0;
  const PartsAtCost own = ways.at(shape, way);
  int64_t least = own.cost * kLanes + way;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) least = smaller(least, __shfl_xor_sync(~0u, least, mask));
  const int32_t best = static_cast<int32_t>(least) % kLanes;
  return {least / kLanes, __shfl_sync(~0u, own.step, best), __shfl_sync(~0u, own.count, best)};
}

/* Not a part of `plan`, whose registers are short. */
__device__ inline __attribute__((noinline)) EqualParts find_equal_parts(const FmPlanShape& shape, const Line<Position>& line,
                                                                        int32_t filled) {
  return equal_parts(shape, line, filled, best_parts_of_lanes);
}

/* Of a unit to a thread, and a request of a ragged batch. */
struct Planner {
  struct Own {
    Unit unit{};
    Span<Position> span;
    Span<Position> cuts; /* those that fall on the span, whatever becomes of them */
  };
  const FmPlanParams& params;
  const FmPlanShape& shape;
  Shared& shared;
  int32_t thread; /* its number is that of its unit, its request and its cut, too */
  int32_t units;
  int32_t filled = 0; /* units that have tiles */
  Own own;

  __device__ __forceinline__ Planner(const FmPlanParams& p, Shared& s)
      : params(p), shape(p.shape), shared(s), thread(threadIdx.x), units(p.layout.units) {
    if (thread < kCutWords) shared.cut_units[thread] = 0;
  }

  __device__ __forceinline__ bool has_tiles() const { return tiles_of(shape, own.span) > 0; }

  __device__ __forceinline__ void read_requests() {
    Request request{};
    uint32_t asked = 0;
    if (thread < shape.batch) {
      request.queries = load_query_range(params, thread);
      request.seq_len = load_seq_len(params, thread);
      constexpr uint32_t kMost = kMaxThreads; /* overlapping ranges may ask for any number */
      const uint64_t by_range = uint64_t{static_cast<uint32_t>(blocks_of(shape, request.queries.len))} * shape.kv_heads;
      asked = by_range < kMost ? by_range : kMost;
    }
    const Scanned scanned = scan_block(asked, shared.warp_sum[1]);
    if (thread < shape.batch) {
      request.first_unit = scanned.before;
      shared.requests[thread] = request;
    }
    units = min(scanned.all, uint32_t(units));
    __syncthreads();
    const auto first_unit = [this](int32_t r) { return shared.requests[r].first_unit; };
    const auto is_of = [&](int32_t index, int32_t r) {
      return first_unit(r) <= index && (r + 1 == shape.batch || first_unit(r + 1) > index);
    };
    if (thread >= units) return;
    int32_t at = thread; /* as it is where each request has one unit */
    if (at >= shape.batch || !is_of(thread, at)) at = last_at_or_before(shape.batch, thread, first_unit);
    const Request& found = shared.requests[at];
    own.unit = ragged_unit(shape, at, found.queries, found.seq_len, thread - found.first_unit);
  }

  __device__ __forceinline__ void read_units() {
    if (shape.ragged) return read_requests();
    if (thread >= units) return;
    Unit& unit = own.unit;
    unit = uniform_unit(shape, params.layout.blocks, thread);
    if (shape.sparse_q_len > 0)
      load_list_lens(params, unit);
    else
      unit.seq_len = params.seq_lens[unit.request * params.seq_lens_stride[0]]; /* clamped where it is needed */
  }

  /* Returns the length of the line, or a number from kMaxLine on where it is too long. */
  __device__ __forceinline__ uint32_t lay_out() {
    uint32_t cost = 0;
    if (thread < units) {
      Unit& unit = own.unit;
      unit.seq_len = clamp_seq_len(shape, unit.seq_len);
      cost = uint32_t(unit_tiles(shape, unit)) + shape.fixed_cost;
    }
    const Scanned scanned = scan_block(min(cost, kMaxLine), shared.warp_sum[0]);
    own.span = {Position(scanned.before), Position(scanned.before + cost)};
    return scanned.all;
  }

  __device__ __forceinline__ void find_cuts(const Line<Position>& line) {
    own.cuts = {ceil_div(own.span.begin, line.share), ceil_div(own.span.end, line.share)};
  }

  /* Where a cut goes when no unit is cut: to the unit's end rather than to its beginning? */
  __device__ __forceinline__ static bool snaps_to_end(const Line<Position>& line, const Own& of, Position cut) {
    return nearer_to_end(of.span, cut * line.share.by);
  }

  template <bool kFew>
  __device__ __forceinline__ bool decide(const Line<Position>& line) {
    const bool each = has_worker_each(shape, line), has_unit = thread < units;
    const bool has_cuts = has_unit && !each && own.cuts.begin < own.cuts.end;
    bool first_to_end = false, last_to_end = false;
    if (has_cuts) {
      first_to_end = snaps_to_end(line, own, own.cuts.begin);
      last_to_end = snaps_to_end(line, own, own.cuts.end - 1);
      shared.snapped[own.cuts.begin] = first_to_end ? own.span.end : own.span.begin;
    }
    filled = __syncthreads_count(has_unit && has_tiles());
    const int64_t most = kFew ? fair_whole_stretch(shape, line, filled) : fair_uneven_stretch(shape, line.share.by);
    bool fair = true;
    if (has_unit && each) fair = own.span.end - own.span.begin <= most;
    if (has_cuts) {
      const Position next = own.cuts.end * line.share.by < line.total ? shared.snapped[own.cuts.end] : line.total;
      fair = next - (last_to_end ? own.span.end : own.span.begin) <= most &&
             (first_to_end || !last_to_end || own.span.end - own.span.begin <= most);
    }
    return __syncthreads_and(fair);
  }

  /* Equal parts where units with tiles are equal and that is as good, else none. */
  __device__ __forceinline__ EqualParts cut_equally(const Line<Position>& line) const {
    if (!may_be_equal(shape, line, filled)) return {};
    const EqualParts equal = find_equal_parts(shape, line, filled);
    if (equal.step == 0) return equal;
    const int32_t tiles = tiles_of(shape, own.span);
    const bool same = thread >= units || tiles == 0 || tiles == equal.tiles;
    return __syncthreads_and(same) ? equal : EqualParts{};
  }

  /* Leaves units that may be dealt out or cut into parts of a common length. */
  __device__ __forceinline__ void leave_units() const {
    if (thread < units) {
      shared.whole.unit[thread] = own.unit;
      shared.whole.tiles[thread] = tiles_of(shape, own.span);
    }
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
  __device__ __forceinline__ void write_first_items(FmWorkItem* staged, int32_t room, const Parts<Position>& parts,
                                                    const Tally& before) const {
    if (units > room) {
      if (thread < units) write_item(before.items, own.unit, parts, 0, before);
      return;
    }
    constexpr int kPieces = sizeof(FmWorkItem) / sizeof(int4);
    const int32_t lane = thread % 32, warp_begin = thread - lane;
    if (warp_begin >= units) return;
    const int4* from = reinterpret_cast<const int4*>(staged + warp_begin);
    int4* to = section<int4>(params, params.layout.items);
    store(staged + thread, make_item(own.unit, parts, 0, before));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t piece = i * 32 + lane, of = piece / kPieces, place = __shfl_sync(~0u, before.items, of);
      if (warp_begin + of < units) to[place * kPieces + piece % kPieces] = from[piece];
    }
    __syncwarp();
  }

  __device__ __forceinline__ Tally write_whole(const Line<Position>& line) const {
    write_first_items(shared.staged, kStagedItems, {0, 0, 1, tiles_of(shape, own.span)}, {thread, 0, 0});
    if (has_worker_each(shape, line)) {
      write_workers(params, [&](int32_t worker) { return unit_of_worker(shape, line, worker); });
      return {units, 0, 0};
    }
    if (thread < units) {
      int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
#pragma unroll 1
      for (Position cut = own.cuts.begin; cut < own.cuts.end; ++cut) worker_begin[cut] = thread + (snaps_to_end(line, own, cut) ? 1 : 0);
    }
    write_idle_workers(line, units);
    return {units, 0, 0};
  }

  __device__ __forceinline__ Tally write_cut(const Line<Position>& line) {
    Parts<Position> parts{0, 0, 1, 0};
    /* A byte each: inner cuts, merges, and units that have many inner cuts. There are fewer cuts than workers. */
    uint32_t packed = 0;
    if (thread < units) {
      parts = parts_at_shares(shape, line, own.span);
      const int32_t inner = parts.count - 1;
      packed = (inner > kFewCuts ? 1u << 16 : 0) + (inner > 0 ? 1u << 8 : 0) + inner;
    }
    const Scanned scanned = scan_block(packed, shared.warp_sum[1]);
    const bool by_cuts = scanned.all >> 16 > 0; /* else a unit's thread writes all of it */
    const Tally before = tally(thread, scanned.before);
    if (by_cuts && parts.count > 1) {
      const Position first = first_inner_cut(shape, line, own.span);
      shared.of_cut.unit[first] = {own.unit, parts, before};
      atomicOr(&shared.cut_units[first / 32], 1u << first % 32);
    }
    if (by_cuts) __syncthreads();
    write_first_items(shared.of_cut.staged, kStagedBesideCuts, parts, before);
    if (thread < units) {
      write_snapped_cuts(line, parts, before);
      if (parts.count > 1) {
        store(section<FmMerge>(params, params.layout.merges) + before.merges, make_merge(own.unit, parts, before));
        const Position first = first_inner_cut(shape, line, own.span);
#pragma unroll 1
        for (int32_t j = 1; !by_cuts && j < parts.count; ++j) write_part(first + j - 1, {own.unit, parts, before}, j);
      }
    }
#pragma unroll 1
    for (int32_t cut = thread; by_cuts && cut < shape.workers; cut += blockDim.x) write_inner_cut(cut);
    const Tally all = tally(units, scanned.all);
    write_idle_workers(line, all.items);
    return all;
  }

  __device__ __forceinline__ Tally write_equal(const EqualParts& equal) {
    const Parts<Position> parts = parts_of_filled<Position>(equal);
    if (thread < units) write_equal_unit(equal, parts);
    __syncthreads();
    write_workers(params, [&](int32_t worker) { return first_item(shape, equal.turns, worker); });
#pragma unroll 1
    for (int32_t part = thread; part < equal.turns.parts; part += blockDim.x) {
      const int32_t rank = part / equal.count;
      const FilledUnit& of = shared.filled_units[rank];
      const int32_t item = item_of_part(shape, equal.turns, part, of.empty_before);
      write_item(item, of.unit, parts, part - rank * equal.count, before_filled(equal, rank));
    }
    return tally_of(equal);
  }

  /* Units with tiles before the thread's, all of them of so many: the tiles before it say how many. */
  __device__ __forceinline__ int32_t filled_before(int32_t tiles) const {
    return thread < units ? (own.span.begin - thread * shape.fixed_cost) / tiles : 0;
  }

  /* An empty unit, or the merge of another. */
  __device__ __forceinline__ void write_equal_unit(const EqualParts& equal, const Parts<Position>& parts) const {
    const int32_t rank = filled_before(equal.tiles);
    if (!has_tiles()) {
      const int32_t item = item_of_empty(shape, equal.turns, thread - rank, rank * equal.count);
      return write_item(item, own.unit, Parts<Position>{0, 0, 1, 0}, 0, Tally{});
    }
    shared.filled_units[rank] = {own.unit, thread - rank};
    if (equal.count == 1) return;
    store(section<FmMerge>(params, params.layout.merges) + rank, make_merge(own.unit, parts, before_filled(equal, rank)));
  }

  __device__ __forceinline__ static Tally tally(int32_t units, uint32_t packed) {
    const int32_t inner = packed & 0xff, merges = packed >> 8 & 0xff;
    return {units + inner, merges, inner + merges};
  }

  /* The workers that begin at either end of the unit because a part would become too short. */
  __device__ __forceinline__ void write_snapped_cuts(const Line<Position>& line, const Parts<Position>& parts, const Tally& before) const {
    int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
#pragma unroll 1
    for (Position cut = own.cuts.begin; cut < own.cuts.end; ++cut) {
      const Cut at = cut_at_share(shape, line, thread, own.span, cut, cut * line.share.by);
      if (at.part > 0) {
        cut += parts.count - 2; /* to the last inner cut */
      } else {
        worker_begin[cut] = before.items + (at.unit == thread ? 0 : parts.count);
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

/* Equal parts beside whole units, which have been left. `before`: units with tiles before the thread's. Not a part of `plan`, either. */
__device__ inline __attribute__((noinline)) Tally write_beside_whole(const FmPlanParams& params, Shared& shared, int32_t units,
                                                                     EqualParts equal, int32_t before) {
  const FmPlanShape& shape = params.shape;
  const int32_t thread = threadIdx.x, rank = before - equal.whole;
  const Parts<Position> parts = parts_of_filled<Position>(equal);
  FmWorkItem* items = section<FmWorkItem>(params, params.layout.items);
  if (thread < units) {
    const Unit& unit = shared.whole.unit[thread];
    const int32_t tiles = shared.whole.tiles[thread];
    if (tiles == 0 || rank < 0) {
      const int32_t item = tiles > 0 ? item_of_whole(shape, equal, before) : item_of_empty(shape, equal, thread - before, before);
      store(items + item, make_item(unit, Parts<Position>{0, 0, 1, tiles}, 0, Tally{}));
    } else {
      shared.whole.dealt.of_rank[rank] = thread;
      store(section<FmMerge>(params, params.layout.merges) + rank, make_merge(unit, parts, before_filled(equal, rank)));
    }
  }
  __syncthreads();
  write_workers(params, [&](int32_t worker) { return first_item(shape, equal, worker); });
#pragma unroll 1
  for (int32_t part = thread; part < equal.cut() * equal.count; part += blockDim.x) {
    const int32_t of = part / equal.count;
    const Unit& unit = shared.whole.unit[shared.whole.dealt.of_rank[of]];
    store(items + item_of_part(shape, equal, part, 0), make_item(unit, parts, part - of * equal.count, before_filled(equal, of)));
  }
  return tally_of(equal);
}

/* Of units that have been left: whole. Not a part of `plan`, either. */
__device__ inline __attribute__((noinline)) bool deal_left_whole(const FmPlanParams& params, Shared& shared, int32_t units, Position share) {
  auto& whole = shared.whole;
  return deal_whole(
      params, whole.dealt, units, share, [&](int32_t index) { return whole.tiles[index]; },
      [&](int32_t index) { return whole.unit[index]; });
}

/* The same: longest first. */
__device__ inline __attribute__((noinline)) DealtParts deal_left_units(const FmPlanParams& params, Shared& shared, Line<Position> line,
                                                                       Position common) {
  auto& whole = shared.whole;
  const LongestFirst way = longest_first(params.shape, line, count_filled(shared, line.units), common);
  return deal_longest_first(
      params, way, whole.dealing, line.units, [&](int32_t index) { return whole.tiles[index]; },
      [&](int32_t index) { return whole.unit[index]; });
}

/* Units are cut where the even shares end, but into no part shorter than min_part. */
__device__ __forceinline__ Tally write_cut_at_shares(Planner& planner, Line<Position>& line) {
  const Position share = cutting_share(planner.shape, line.share.by);
  if (share != line.share.by) {
    line.share = Divisor<Position>(share);
    planner.find_cuts(line);
  }
  return planner.write_cut(line);
}

/* Units that are few and to be cut: whole, longest first or in parts of a common length, if one of these pays. */
__device__ __forceinline__ bool write_few(Planner& planner, Line<Position>& line, bool may_be_alike, Tally& all) {
  const FmPlanParams& params = planner.params;
  if (!are_few(params.shape, line.units)) return false;
  planner.leave_units();
  const Position common = may_be_alike ? find_common_length(params.shape, planner.shared, line) : 0;
  if (common == 0 && may_be_dealt_whole(params.shape, line.units) && deal_left_whole(params, planner.shared, line.units, line.share.by)) {
    line.whole = 1;
    all = {line.units, 0, 0};
    return true;
  }
  const DealtParts dealt = deal_left_units(params, planner.shared, line, common);
  if (dealt.step > 0) {
    line.whole = dealt.all.merges == 0;
    line.share.by = dealt.step;
    all = dealt.all;
    return true;
  }
  if (common == 0) return false;
  line.share.by = common;
  all = cut_alike(params, planner.shared, line, common);
  return true;
}

/* Plans, unless the line is too long for this way: then nothing has been written, and the answer is false. kFew: the requests may be few. */
template <bool kFew>
__device__ __forceinline__ bool plan(const FmPlanParams& params, Shared& shared) {
  Planner planner(params, shared);
  planner.read_units();
  Divisor<Position> workers(params.shape.workers);
  compute_now(workers.inverse); /* while the lengths are on their way */
  const uint32_t total = planner.lay_out();
  if (total >= kMaxLine) return false;
  Line<Position> line{Position(total), Divisor<Position>(even_share(Position(total), workers)), planner.units, 1};
  planner.find_cuts(line);
  line.whole = planner.decide<kFew>(line);
  const bool may_be_alike = kFew && may_have_common_length(params.shape, line, planner.filled);
  const EqualParts equal = planner.cut_equally(line);
  if (equal.step > 0) line.whole = 0;
  Tally all;
  if (line.whole) {
    all = planner.write_whole(line);
  } else if (equal.whole > 0) {
    line.share.by = equal.step;
    if (!kFew || line.units > kMostFewUnits) return false;
    planner.leave_units();
    all = write_beside_whole(params, shared, line.units, equal, planner.filled_before(equal.tiles));
  } else if (equal.step > 0) {
    line.share.by = equal.step;
    all = planner.write_equal(equal);
  } else if (!kFew || !write_few(planner, line, may_be_alike, all)) {
    all = write_cut_at_shares(planner, line);
  }
  if (threadIdx.x == 0) store(section<FmPlanHeader>(params, 0), make_header(line, all));
  return true;
}

}  // namespace small
}  // namespace plan
}  // namespace ferromla
