// Units that have as many tiles each, shared out evenly: cut into equal parts, one to a worker, or, more than workers, as many
// whole ones to each, in Turns, or, of many rows, as many to each and equal parts of the others (Rest). Units without tiles do not count.
// `crates/schedule/equal_parts.rs` is the same in Rust.
//
// Nothing here needs a running sum.
#pragma once
#include "../plan_algorithm.h"
#include "rest.h"
#include "turns.h"

namespace ferromla {
namespace plan {

/* A number of parts that is no power of two costs as much to add up as so many more parts, ... */
constexpr int32_t kCostOfUneven = 16;
/* ... up to as many as this. Of more each CTA adds up so little that its warps go through it once. */
constexpr int32_t kMostUneven = 64;
/* Numbers of parts that are looked at: powers of two from the largest down, besides as many as there are workers for. */
constexpr int32_t kPowers = 4;
/* Costs above it count as this much: so no product passes 63 bits. */
constexpr int32_t kMostCost = 1 << 15;

struct EqualParts {
  int32_t step;   /* tiles of a part, but for the last of a unit; 0: units are not dealt with this way */
  int32_t tiles;  /* of each unit that has any */
  int32_t count;  /* parts of such a unit, if it is cut */
  int32_t filled; /* units that have tiles */
  Turns turns;    /* who has which part */
  int32_t whole;  /* the first of these, as many for each worker, that are not cut where others are */

  FM_BOTH int32_t cut() const { return filled - whole; }
  FM_BOTH Rest rest() const { return {turns.each, cut(), count, step, tiles}; }
};

/* Parts of a unit, and what they cost: the longer of what a part takes a worker and of what all units take the machine, and
   adding up the parts, which takes longer the more they are, and where they are no power of two. In 256ths of tiles. */
struct PartsAtCost {
  int64_t cost;
  int32_t step;
  int32_t count;
};

FM_BOTH PartsAtCost parts_at_cost(const FmPlanShape& shape, int32_t tiles, int32_t step, int64_t even) {
  step = step < shape.min_part ? shape.min_part : step;
  /* The last part is no shorter than min_part. */
  const int32_t count = (tiles - shape.min_part) / step + 1;
  const bool uneven = (count & (count - 1)) != 0 && count <= kMostUneven;
  const int64_t adding = (count + (uneven ? kCostOfUneven : 0)) * smaller(shape.part_cost, kMostCost);
  return {larger(int64_t{step} * 256, even) + adding, step, count};
}

/* Ways to cut a unit: into as many parts as there are workers for, and into powers of two. */
constexpr int kWaysToCut = 1 + kPowers;
struct WaysToCut {
  int64_t even; /* what all units take the machine */
  int32_t tiles, most;
  int32_t bits; /* of the largest power of two */

  FM_BOTH bool has(int way) const { return way < kWaysToCut && way <= bits; }
  FM_BOTH PartsAtCost at(const FmPlanShape& shape, int way) const {
    const int32_t step = way == 0 ? (tiles - 1) / most + 1 : ((tiles - 1) >> (bits + 1 - way)) + 1;
    return parts_at_cost(shape, tiles, step, even);
  }
};

template <class P>
FM_BOTH WaysToCut ways_to_cut(const FmPlanShape& shape, P tiles, int32_t filled) {
  const int32_t unit_tiles = static_cast<int32_t>(tiles);
  const int32_t most = static_cast<int32_t>(clamp(unit_tiles / shape.min_part, 1, shape.workers / filled));
  const int64_t even = int64_t{tiles * filled * 16 / shape.workers} * smaller(shape.equal_speed, kMostCost) / 16;
  int32_t bits = 0;
  while (bits < 30 && 2 << bits <= most) ++bits;
  return {even, unit_tiles, most, bits};
}

/* The parts of a unit that cost least, the first of those that cost as much. */
FM_BOTH PartsAtCost best_parts(const FmPlanShape& shape, const WaysToCut& ways) {
  PartsAtCost best = ways.at(shape, 0);
#pragma unroll 1
  for (int way = 1; ways.has(way); ++way) {
    const PartsAtCost other = ways.at(shape, way);
    if (other.cost < best.cost) best = other;
  }
  return best;
}

/* Whether units of which `filled` have tiles may be shared out otherwise than on the line, as far as their numbers go: they may all
   have as many tiles, and are few. Not where on the line they are whole, and nearly all workers have as many of them, or one. */
template <class P>
FM_BOTH bool may_be_equal(const FmPlanShape& shape, const Line<P>& line, int32_t filled) {
  const int64_t workers = shape.workers;
  const int32_t rounds = filled <= workers ? 1 : filled <= 2 * workers ? 2 : kMostRounds;
  if (filled == 0 || filled > workers * kMostRounds) return false;
  const bool most_have_all = rounds == 1 || int64_t{filled} * 8 > (rounds * 8 - 1) * workers;
  if (line.whole && filled == line.units && most_have_all) return false;
  const P all_tiles = line.total - static_cast<P>(line.units) * shape.fixed_cost;
  return all_tiles / filled * filled == all_tiles;
}

/* The parts of units of which `filled` have tiles, all as many (may_be_equal), where the longest is about as good for a worker as
   an even share and what cutting at even shares costs: those that the units would have without the empty ones. `line.whole` says
   whether with these whole units share out evenly; then there is nothing to do for units that would be whole without them, too,
   and no more than workers. `best_of`: best_parts. */
template <class P, class Best>
FM_BOTH EqualParts equal_parts(const FmPlanShape& shape, const Line<P>& line, int32_t filled, const Best& best_of) {
  const int32_t empty = line.units - filled;
  const P tiles = (line.total - static_cast<P>(line.units) * shape.fixed_cost) / filled;
  const P cost = tiles + shape.fixed_cost;
  const P share = (cost * filled + shape.workers - 1) / shape.workers;
  const int32_t unit_tiles = static_cast<int32_t>(tiles);
  const int32_t rounds = (filled - 1) / shape.workers + 1;
  const bool halves = filled <= shape.workers / 2; /* all could be cut in two, with a worker for each part */
  const int64_t most = fair_stretch(share, shape.equal_speed, halves ? shape.split_cost : shape.equal_split_cost);
  const int64_t most_uneven = fair_uneven_stretch(shape, share);
  const int64_t most_whole = halves ? fair_beside_own_parts(shape, most) : rounds > 1 ? larger(most, most_uneven) : most;
  const bool whole = static_cast<int64_t>(cost) * rounds <= most_whole;
  if (!halves && (whole || !line.whole)) {
    const Rest rest = rest_beside_whole(shape, filled, unit_tiles, whole);
    const int32_t kept = filled - rest.units;
    if (rest.units > 0) return {rest.step, unit_tiles, rest.count, filled, {kept + rest.cut(), empty, rest.each}, kept};
  }
  if (whole) {
    const bool as_on_the_line = line.whole && rounds == 1;
    return as_on_the_line ? EqualParts{} : EqualParts{unit_tiles, unit_tiles, 1, filled, {filled, empty, rounds}, 0};
  }
  if (!halves) return {};
  const PartsAtCost best = best_of(shape, ways_to_cut(shape, tiles, filled));
  const int64_t most_of_part = shape.unit_rows < FM_TILE_ROWS ? larger(most, most_uneven) : most - shape.split_cost / 4;
  if (best.step >= unit_tiles || int64_t{best.step} + shape.fixed_cost > most_of_part) return {};
  return {best.step, unit_tiles, best.count, filled, {filled * best.count, empty, 1}, 0};
}

/* How a unit that has tiles is cut, if it is. */
template <class P>
FM_BOTH Parts<P> parts_of_filled(const EqualParts& equal) {
  return {0, equal.step, equal.count, equal.tiles};
}

/* What comes before the unit that has `rank` others that are cut before it. Items are not counted. */
FM_BOTH Tally before_filled(const EqualParts& equal, int32_t rank) { return {0, rank, rank * equal.count}; }

FM_BOTH Tally tally_of(const EqualParts& equal) {
  const int32_t items = items_of(equal.turns);
  return equal.count > 1 ? Tally{items, equal.cut(), equal.cut() * equal.count} : Tally{items, 0, 0};
}

/* First item of a worker, 0 <= worker <= workers. */
FM_BOTH int32_t first_item(const FmPlanShape& shape, const EqualParts& equal, int32_t worker) {
  if (equal.whole > 0) return equal.rest().first_item(worker) + empty_before(shape, equal.turns, worker);
  return first_item(shape, equal.turns, worker);
}

/* The item of a whole unit that has `rank` others with tiles before it, beside units that are cut. */
FM_BOTH int32_t item_of_whole(const FmPlanShape& shape, const EqualParts& equal, int32_t rank) {
  return equal.rest().item_of_whole(rank) + empty_before(shape, equal.turns, rank / equal.turns.each);
}

/* The item of part `part` of all units that are cut; that one has `empty` empty ones before it. */
FM_BOTH int32_t item_of_part(const FmPlanShape& shape, const EqualParts& equal, int32_t part, int32_t empty) {
  if (equal.whole > 0) return equal.rest().item_of_part(part) + empty_before(shape, equal.turns, part);
  return item_of_part(shape, equal.turns, part, empty);
}

/* The item of the empty unit that has `empty` others and `rank` units with tiles before it. */
FM_BOTH int32_t item_of_empty(const FmPlanShape& shape, const EqualParts& equal, int32_t empty, int32_t rank) {
  if (equal.whole == 0) return item_of_empty(shape, equal.turns, empty, rank * equal.count);
  const int32_t worker = shape.workers - 1 - empty % shape.workers; /* behind what it has else */
  const int32_t others = equal.turns.each + (worker < equal.rest().cut() ? 1 : 0);
  return first_item(shape, equal, worker) + others + empty / shape.workers;
}

}  // namespace plan
}  // namespace ferromla
