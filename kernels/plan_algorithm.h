// The arithmetic of the planner, for host and device: what a unit costs, where the shares of the workers
// end, into which parts a unit is cut. Pure functions of one unit or one cut; who calls them for which unit
// is the business of plan.cu. `crates/schedule/algorithm.rs` and `fixed_parts.rs` are the same in Rust, name by name,
// and a test compares the plans of both byte by byte.
//
// Positions on the line of work are of type P: int64_t, or int32_t where whoever calls has made sure that it holds the line
// (plan/small.cuh, by_cluster.cuh, by_count.cuh). With the limits that the host checks (every field of FmPlanShape in
// [0, 2^31), rows, units and items below 2^31) no expression here overflows 64 bits: a unit has at most 2^25 tiles and costs
// less than 2^32, so the line is shorter than 2^63.
#pragma once
#include "both.h"
#include "plan_layout.h"

namespace ferromla {
namespace plan {

FM_BOTH int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FM_BOTH int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FM_BOTH int64_t clamp(int64_t x, int64_t low, int64_t high) { return larger(low, smaller(x, high)); }

/* One request, one KV head, one block of query rows. */
struct Unit {
  int32_t request;
  int32_t kv_head;
  int32_t row_begin;
  int32_t q_begin; /* first query token of the request along q's token axis; 0 unless ragged or sparse */
  int32_t q_len;
  int32_t seq_len;  /* clamped */
  int32_t main_len; /* sparse only, else 0: clamped */
};

FM_BOTH int32_t clamp_seq_len(const FmPlanShape& shape, int32_t seq_len) {
  return seq_len < 0 ? 0 : seq_len < shape.max_seq_len ? seq_len : shape.max_seq_len;
}

/* Where the keys of a sparse token end. Those of the extra cache begin with a tile, so that no tile is of both. */
FM_BOTH int32_t end_of_keys(int32_t main_len, int32_t extra_len) {
  const uint32_t tiles = (static_cast<uint32_t>(main_len) + FM_TILE_TOKENS - 1) / FM_TILE_TOKENS;
  return extra_len == 0 ? main_len : static_cast<int32_t>(tiles * FM_TILE_TOKENS) + extra_len;
}

/* Query tokens of a request along q's token axis. */
struct QueryRange {
  int32_t begin;
  int32_t len;
};

/* Of a request of a ragged batch, from its two entries of qo_indptr, whatever they hold. */
FM_BOTH QueryRange query_range(const FmPlanShape& shape, int32_t begin, int32_t end) {
  const int32_t most = shape.q_tokens;
  begin = begin < 0 ? 0 : begin < most ? begin : most;
  return {begin, (end < begin ? begin : end < most ? end : most) - begin};
}

/* Row blocks, and so units per KV head, of a request. */
FM_BOTH int32_t blocks_of(const FmPlanShape& shape, int32_t q_len) {
  const uint32_t rows = static_cast<uint32_t>(q_len) * shape.group; /* < 2^31, as unit_rows */
  return static_cast<int32_t>((rows + shape.unit_rows - 1) / shape.unit_rows);
}

/* KV tiles that any row of the unit sees. `token_of(row)` divides by the group. */
template <class TokenOf>
FM_BOTH int32_t unit_tiles(const FmPlanShape& shape, const Unit& unit, TokenOf token_of) {
  int32_t visible = unit.seq_len;
  if (shape.causal) {
    const uint32_t rows = static_cast<uint32_t>(unit.q_len) * shape.group;
    const uint32_t row_end = static_cast<uint32_t>(unit.row_begin) + shape.unit_rows;
    if (row_end < rows) {
      const int32_t last_token = token_of(row_end - 1);
      visible += last_token + 1 - unit.q_len; /* keys that the last row sees, fewer than all */
      visible = visible < 0 ? 0 : visible;
    }
  }
  return static_cast<int32_t>((static_cast<uint32_t>(visible) + FM_TILE_TOKENS - 1) / FM_TILE_TOKENS);
}
FM_BOTH int32_t unit_tiles(const FmPlanShape& shape, const Unit& unit) {
  return unit_tiles(shape, unit, [&](uint32_t row) { return static_cast<int32_t>(row / shape.group); });
}

/* A number that many positions are divided by. */
template <class P>
struct Divisor;

template <>
struct Divisor<int64_t> {
  int64_t by;

  FM_BOTH explicit Divisor(int64_t b) : by(b) {}
  FM_BOTH int64_t floor(int64_t x) const { return x / by; }
};

/* Of positions below 2^31. x / by - x * inverse / 2^32 <= x / 2^32 < 1, so the estimate is exact or 1 too low. */
template <>
struct Divisor<int32_t> {
  int32_t by;
  uint32_t inverse;

  FM_BOTH explicit Divisor(int32_t b) : by(b), inverse(0xffffffffu / static_cast<uint32_t>(b)) {}
  FM_BOTH int32_t floor(int32_t x) const {
    const int32_t estimate = static_cast<int32_t>((static_cast<uint64_t>(static_cast<uint32_t>(x)) * inverse) >> 32);
    return estimate + (x - estimate * by >= by ? 1 : 0);
  }
};

/* For x >= 0. */
template <class P>
FM_BOTH P ceil_div(P x, const Divisor<P>& divisor) {
  const P floor = divisor.floor(x);
  return floor + (floor * divisor.by != x ? 1 : 0);
}

/* An even share of the work line for each worker. */
template <class P>
FM_BOTH P even_share(P total, const Divisor<P>& workers) {
  const P share = ceil_div(total, workers);
  return share < 1 ? 1 : share;
}

/* Where a unit stands on the line: its fixed cost first, then its tiles. */
template <class P>
struct Span {
  P begin;
  P end;
};

/* The units laid one after another. */
template <class P>
struct Line {
  P total;
  Divisor<P> share; /* cut c is wished for at c * share */
  int32_t units;
  int32_t whole;    /* FM_SPLIT_AUTO: no unit is cut */
};

/* The parts a unit is cut into: inner part j begins at tile origin + j * step. */
template <class P>
struct Parts {
  P origin;
  P step;
  int32_t count;
  int32_t tiles;
};

/* First tile of part j, 0 <= j <= count; the end of the unit for j == count. */
template <class P>
FM_BOTH int32_t part_tile(const Parts<P>& parts, int32_t j) {
  if (j == 0) return 0;
  return j >= parts.count ? parts.tiles : static_cast<int32_t>(parts.origin + j * parts.step);
}

template <class P>
FM_BOTH int32_t tiles_of(const FmPlanShape& shape, const Span<P>& span) {
  return static_cast<int32_t>(span.end - span.begin - shape.fixed_cost);
}

/* The first cut that is at least min_part tiles into the unit. */
template <class P>
FM_BOTH P first_inner_cut(const FmPlanShape& shape, const Line<P>& line, const Span<P>& span) {
  const P first = ceil_div<P>(span.begin + shape.fixed_cost + shape.min_part, line.share);
  return first < 1 ? 1 : first;
}

/* The cuts that fall inside a unit, no nearer than min_part to its ends: as cuts are evenly spaced, a
   closed range of them. */
template <class P>
FM_BOTH Parts<P> parts_at_shares(const FmPlanShape& shape, const Line<P>& line, const Span<P>& span) {
  const P first = first_inner_cut(shape, line, span);
  const P end = span.end - shape.min_part;
  P last = end < 0 ? 0 : line.share.floor(end);
  last = last < shape.workers ? last : shape.workers - 1;
  const int32_t inner = first <= last ? static_cast<int32_t>(last - first) + 1 : 0;
  return {(first - 1) * line.share.by - span.begin - shape.fixed_cost, line.share.by, inner + 1,
          tiles_of(shape, span)};
}

/* Whether each step has a slot. */
FM_BOTH bool stores_steps(const FmPlanShape& shape) { return shape.steps == FM_STEPS_STORED; }

/* Tiles of a step of a unit of so many, as a power of two: with more tiles more, but not as many more. Where steps are stored they are
   twice as long in long units, and longer yet only if there would be too many of them. */
FM_BOTH int32_t step_log2(const FmPlanShape& shape, int32_t tiles) {
  const bool stored = stores_steps(shape);
  int32_t log2 = stored ? FM_STORED_STEP_LOG2 : FM_STEP_LOG2;
  int64_t most = FM_STEP_UNIT;
  if (stored) {
    log2 += tiles > FM_STORED_STEP_UNIT;
    most = int64_t{shape.num_splits} << log2;
  }
  for (; tiles > most; most *= stored ? 2 : 8) ++log2;
  return log2;
}
FM_BOTH int32_t steps_of(const FmPlanShape& shape, int32_t tiles) {
  const int32_t log2 = step_log2(shape, tiles);
  return (tiles + (1 << log2) - 1) >> log2;
}

/* Tiles of a part of a unit of so many, but for the last, where the mode fixes their number. All of these are at most 2^25. */
FM_BOTH uint32_t tiles_of_part(const FmPlanShape& shape, int32_t tiles) {
  uint32_t wanted = static_cast<uint32_t>(
      shape.split_mode == FM_SPLIT_INVARIANT
          ? clamp((tiles + shape.part_tiles - 1) / shape.part_tiles, 1, shape.num_splits)
          : shape.split_mode == FM_SPLIT_FIXED ? clamp(shape.num_splits, 1, tiles) : 1);
  if (shape.steps && wanted > FM_FEW_PARTS && tiles <= int64_t{2 * FM_FEW_PARTS} * shape.part_tiles) wanted = FM_FEW_PARTS;
  const uint32_t part = (tiles + wanted - 1) / wanted;
  const int32_t log2 = shape.steps ? step_log2(shape, tiles) : 0;
  return (part + (1u << log2) - 1) >> log2 << log2;
}

/* Whether it is cut wherever steps end. */
FM_BOTH bool is_in_steps(const FmPlanShape& shape, int32_t tiles) { return shape.steps && steps_of(shape, tiles) <= shape.few_steps; }

/* Into how many parts then. */
FM_BOTH int32_t parts_in_steps(const FmPlanShape& shape, int32_t tiles) {
  int32_t wanted = shape.few_parts;
  if (stores_steps(shape)) wanted = static_cast<int32_t>(larger(wanted, (tiles + shape.part_tiles - 1) / shape.part_tiles));
  const int32_t steps = steps_of(shape, tiles);
  if (stores_steps(shape) && steps == 3 && wanted == 2) return 3; /* not one of two and one of one */
  return static_cast<int32_t>(smaller(wanted, steps));
}

/* Even parts, as many as the mode asks for; rounding up their length may leave fewer. */
template <class P>
FM_BOTH Parts<P> parts_by_count(const FmPlanShape& shape, int32_t tiles) {
  if (tiles == 0) return {0, 0, 1, 0};
  uint32_t step = tiles_of_part(shape, tiles);
  if (is_in_steps(shape, tiles)) {
    const int32_t parts = parts_in_steps(shape, tiles);
    step = static_cast<uint32_t>((steps_of(shape, tiles) + parts - 1) / parts) << step_log2(shape, tiles);
  }
  return {0, static_cast<P>(step), static_cast<int32_t>((tiles + step - 1) / step), tiles};
}

template <class P>
FM_BOTH Parts<P> parts_of(const FmPlanShape& shape, const Line<P>& line, const Span<P>& span) {
  if (shape.split_mode != FM_SPLIT_AUTO) return parts_by_count<P>(shape, tiles_of(shape, span));
  if (line.whole) return {0, 0, 1, tiles_of(shape, span)};
  return parts_at_shares(shape, line, span);
}

/* Where a worker's stretch begins: at a part of a unit; at part 0 of unit `units` for the line's end. */
struct Cut {
  int32_t unit;
  int32_t part;
};

/* Whether units that stay whole get a worker each. */
template <class P>
FM_BOTH bool has_worker_each(const FmPlanShape& shape, const Line<P>& line) {
  return shape.split_mode == FM_SPLIT_AUTO && line.whole && line.units <= shape.workers;
}

/* The first of those that worker `cut` or a later one has. */
template <class P>
FM_BOTH int32_t unit_of_worker(const FmPlanShape& shape, const Line<P>& line, int32_t cut) {
  return static_cast<int32_t>((static_cast<uint64_t>(cut) * line.units + shape.workers - 1) / shape.workers);
}

/* Whether a cut at x keeps its unit whole by going to the unit's end rather than to its beginning. */
template <class P>
FM_BOTH bool nearer_to_end(const Span<P>& span, P x) {
  return x - span.begin > span.end - x;
}

/* The part boundary nearest to x, which lies in `unit`; the lower of two equally near. */
template <class P>
FM_BOTH Cut nearest_boundary(const FmPlanShape& shape, const Line<P>& line, int32_t unit,
                             const Span<P>& span, P x) {
  const Parts<P> parts = parts_of(shape, line, span);
  const P first_tile = span.begin + shape.fixed_cost;
  int32_t part = 0;
  if (parts.count > 1 && x > first_tile) {
    part = static_cast<int32_t>(smaller((x - first_tile) / parts.step, parts.count - 1));
  }
  const bool last = part + 1 == parts.count;
  const P below = part == 0 ? span.begin : first_tile + part_tile(parts, part);
  const P above = last ? span.end : first_tile + part_tile(parts, part + 1);
  if (!nearer_to_end(Span<P>{below, above}, x)) return {unit, part};
  return last ? Cut{unit + 1, 0} : Cut{unit, part + 1};
}

/* Cut `cut`, which lies in `unit` at x, exactly there, unless a part would become shorter than min_part. */
template <class P>
FM_BOTH Cut cut_at_share(const FmPlanShape& shape, const Line<P>& line, int32_t unit,
                         const Span<P>& span, int32_t cut, P x) {
  const P tile = x - span.begin - shape.fixed_cost;
  const P tiles = tiles_of(shape, span);
  const bool near_start = tile < shape.min_part;
  const bool near_end = tiles - tile < shape.min_part;
  if (!near_start && !near_end) {
    return {unit, static_cast<int32_t>(cut - first_inner_cut(shape, line, span)) + 1};
  }
  const bool to_end = near_start && near_end ? 2 * tile >= tiles : near_end;
  return {unit + (to_end ? 1 : 0), 0};
}

/* The longest stretch of whole units, or the longest of equal parts, that is about as good for a worker as an even share and what
   cutting costs, `split`: a worker goes speed / 256 times faster than the machine divided by the workers. */
template <class P>
FM_BOTH int64_t fair_stretch(P share, int64_t worker_speed, int32_t split) {
  const uint64_t speed = static_cast<uint64_t>(worker_speed);
  const uint64_t even = static_cast<uint64_t>(share);
  if (sizeof(P) == sizeof(int32_t)) return static_cast<int64_t>(even * speed / 256) + split;
  const uint64_t quotient = even / 256 < uint64_t{1} << 46 ? even / 256 : uint64_t{1} << 46;
  return static_cast<int64_t>(quotient * speed + even % 256 * speed / 256) + split;
}

/* What is left of the longest fair stretch `most` of whole units where parts may have workers of their own: being cut costs less. Units
   that cost no more than split_cost stay whole all the same. */
FM_BOTH int64_t fair_beside_own_parts(const FmPlanShape& shape, int64_t most) {
  return larger(most - shape.own_parts_gain, smaller(most, shape.split_cost));
}

/* Whole units of a worker up to which it matters that others have one less: the last ones would be at work alone. */
constexpr int32_t kMostRounds = 3;

/* The same of whole units of different lengths on a line: while the others have work, the longest stretch goes no faster than its
   share. */
template <class P>
FM_BOTH int64_t fair_uneven_stretch(const FmPlanShape& shape, P share) {
  return fair_stretch(share, (int64_t{shape.whole_speed} + 256) / 2, shape.split_cost);
}

/* The most units, and requests, with which the planner takes its time: they may be dealt out, or have parts of a common length. */
constexpr int32_t kMostFewUnits = 384;

/* What has lengths of its own: requests, or tokens with lists. */
FM_BOTH int32_t all_requests(const FmPlanShape& shape) { return shape.batch * (shape.sparse_q_len > 1 ? shape.sparse_q_len : 1); }

FM_BOTH bool has_few_requests(const FmPlanShape& shape) { return all_requests(shape) <= kMostFewUnits; }

/* Whether both are few. Of lists there are no more than units. */
FM_BOTH bool are_few(const FmPlanShape& shape, int32_t units) { return units <= kMostFewUnits && shape.batch <= kMostFewUnits; }

/* The longest stretch of whole units of which `filled` have tiles, of all on a line. Few ones, if each has a worker, get parts of a common
   length otherwise, or are dealt out longest first. */
template <class P>
FM_BOTH int64_t fair_whole_stretch(const FmPlanShape& shape, const Line<P>& line, int32_t filled) {
  const int64_t most = fair_uneven_stretch(shape, line.share.by);
  return are_few(shape, line.units) && filled <= shape.workers ? fair_beside_own_parts(shape, most) : most;
}

/* An even share of the units of a line of which `filled` have tiles, without the others. */
template <class P>
FM_BOTH P share_of_filled(const FmPlanShape& shape, const Line<P>& line, int32_t filled) {
  const P empty = static_cast<P>(line.units - filled) * shape.fixed_cost;
  return (line.total - empty + shape.workers - 1) / shape.workers;
}

/* The share to cut at once units are to be cut: parts must not get shorter than min_part. */
template <class P>
FM_BOTH P cutting_share(const FmPlanShape& shape, P share) {
  return share < shape.min_part ? shape.min_part : share;
}

/* Items and merges of a stretch of units. Slots follow: units that are not cut have one item and none. */
struct Tally {
  int32_t items;
  int32_t merges;
  int32_t slots;
};

/* Where the partial results of a unit's parts go: `each` of a part but for the last; and what its FmMerge says of steps. */
struct UnitSlots {
  int32_t first;
  int32_t each;
  int32_t steps;
  int32_t all;
  int32_t step_log2; /* 0: none */
  int32_t of_whole;  /* what a whole unit's item says */
};

/* `before` counts what comes before the unit. */
FM_BOTH UnitSlots unit_slots(const Tally& before) { return {before.slots, 1, 0, 0, 0, -1}; }

/* The same where parts may have steps. */
template <class P>
FM_BOTH UnitSlots unit_slots(const FmPlanShape& shape, const FmPlanLayout& layout, const Parts<P>& parts, const Tally& before) {
  if (!shape.steps) return unit_slots(before);
  const int32_t log2 = step_log2(shape, parts.tiles);
  if (!is_in_steps(shape, parts.tiles)) return {layout.step_slots + before.slots, 1, 1, parts.count, log2, -1};
  const int32_t of_whole = stores_steps(shape) && steps_of(shape, parts.tiles) > 1 ? FM_SLOTS_OF_WORKER : -1;
  return {before.merges * shape.few_steps, static_cast<int32_t>(parts.step) >> log2,
          static_cast<int32_t>(tiles_of_part(shape, parts.tiles)) >> log2, steps_of(shape, parts.tiles), log2, of_whole};
}

/* Part j of a unit. */
template <class P>
FM_BOTH FmWorkItem make_item(const Unit& unit, const Parts<P>& parts, int32_t j, const Tally& before, const UnitSlots& slots) {
  FmWorkItem item{};
  item.request = unit.request;
  item.kv_head = unit.kv_head;
  item.row_begin = unit.row_begin;
  item.q_begin = unit.q_begin;
  item.q_len = unit.q_len;
  item.seq_len = unit.seq_len;
  item.tile_begin = part_tile(parts, j);
  item.tile_end = part_tile(parts, j + 1);
  item.slot = parts.count > 1 ? slots.first + j * slots.each : slots.of_whole;
  item.merge = parts.count > 1 ? before.merges : -1;
  item.main_len = unit.main_len;
  item.parts = parts.count | slots.step_log2 << 16;
  return item;
}
template <class P>
FM_BOTH FmWorkItem make_item(const Unit& unit, const Parts<P>& parts, int32_t j, const Tally& before) {
  return make_item(unit, parts, j, before, unit_slots(before));
}

template <class P>
FM_BOTH FmMerge make_merge(const Unit& unit, const Parts<P>& parts, const UnitSlots& slots) {
  FmMerge merge{};
  merge.request = unit.request;
  merge.kv_head = unit.kv_head;
  merge.row_begin = unit.row_begin;
  merge.q_begin = unit.q_begin;
  merge.q_len = unit.q_len;
  merge.first_slot = slots.first;
  merge.parts = parts.count;
  merge.steps = slots.steps;
  merge.slots = slots.all;
  return merge;
}
template <class P>
FM_BOTH FmMerge make_merge(const Unit& unit, const Parts<P>& parts, const Tally& before) {
  return make_merge(unit, parts, unit_slots(before));
}

template <class P>
FM_BOTH FmPlanHeader make_header(const Line<P>& line, const Tally& all) {
  FmPlanHeader header{};
  header.version = FM_PLAN_VERSION;
  header.items = all.items;
  header.merges = all.merges;
  header.slots = all.slots;
  header.whole = line.whole;
  header.share = static_cast<int32_t>(smaller(line.share.by, INT32_MAX));
  header.units = line.units;
  return header;
}

}  // namespace plan
}  // namespace ferromla
