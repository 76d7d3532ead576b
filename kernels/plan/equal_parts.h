// Units that have as many tiles each, shared out evenly: cut into equal parts, one to a worker, or, more than workers, as many
// whole ones to each. Units without tiles do not count; each is an item that costs a worker little, and they are dealt out
// evenly. `crates/schedule/equal_parts.rs` is the same in Rust.
//
// Nothing here needs a running sum. A worker has one part, or the next few whole units, if there are that many, and its turns
// of the empty units, so that no worker has two more of them than another. A worker's items stand in the order of their units.
// Where most workers have parts, those without are spread among them: with all of them at the end a launch reads up to a tenth less
// in the same time, as the multiprocessors that have work are not spread evenly over the GPU then.
#pragma once
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

/* Parts of a unit above which each costs more than it saves, unless it is long. */
constexpr int32_t kMostEqualParts = 32;
/* What a number of parts that is no power of two costs to add up, each part above those, and four of any: in 256ths of what being
   split costs. */
constexpr int32_t kCostOfUneven = 64;
/* Numbers of parts that are looked at: powers of two from the largest down, besides as many as there are workers for. */
constexpr int32_t kPowers = 4;
/* Costs above it count as this much: so no product passes 63 bits. */
constexpr int32_t kMostCost = 1 << 15;

struct EqualParts {
  int32_t step;   /* tiles of a part, but for the last of a unit; 0: units are not dealt with this way */
  int32_t tiles;  /* of each unit that has any */
  int32_t count;  /* parts of such a unit */
  int32_t filled; /* units that have tiles */
  int32_t empty;  /* units that have none */
  int32_t parts;  /* of all units with tiles */
  int32_t each;   /* parts of a worker: 1, or more where units are whole */
};

/* The shortest equal part of a unit, in tiles, however many workers there are. */
FM_BOTH int32_t shortest_part(const FmPlanShape& shape, int32_t tiles) {
  const int32_t few = (tiles + kMostEqualParts - 1) / kMostEqualParts;
  return static_cast<int32_t>(larger(smaller(few, int64_t{2} * shape.min_part), shape.min_part));
}

/* Parts of a unit, and what they cost: the longer of what a part takes a worker and of what all units take the machine, and
   adding up the parts, which takes longer where they are many or no power of two. In 256ths of tiles. */
struct PartsAtCost {
  int64_t cost;
  int32_t step;
  int32_t count;
};

FM_BOTH PartsAtCost parts_at_cost(const FmPlanShape& shape, int32_t tiles, int32_t step, int32_t shortest, int64_t even) {
  step = step < shortest ? shortest : step;
  /* The last part is no shorter than min_part. */
  const int32_t count = (tiles - shape.min_part) / step + 1;
  const int32_t uneven = (count & (count - 1)) == 0 ? 0 : kCostOfUneven;
  const int32_t more = count > kMostEqualParts ? count - kMostEqualParts : 0;
  const int64_t adding = static_cast<int64_t>(count / 4 + more + uneven) * smaller(shape.split_cost, kMostCost) *
                         smaller(shape.whole_speed, kMostCost) / 256;
  return {larger(int64_t{step} * 256, even) + adding, step, count};
}

/* The parts of a unit that cost least. */
template <class P>
FM_BOTH PartsAtCost best_parts(const FmPlanShape& shape, P tiles, int32_t filled) {
  const int32_t unit_tiles = static_cast<int32_t>(tiles), shortest = shortest_part(shape, unit_tiles);
  const int32_t most = static_cast<int32_t>(clamp(unit_tiles / shortest, 1, shape.workers / filled));
  const int64_t even = int64_t{tiles * filled * 16 / shape.workers} * smaller(shape.whole_speed, kMostCost) / 16;
  int32_t bits = 0;
  while (bits < 30 && 2 << bits <= most) ++bits;
  PartsAtCost best{INT64_MAX, 0, 0};
  /* As many as there are workers for, then powers of two. One copy of the code: it runs once, and fetching it takes most of the time. */
#pragma unroll 1
  for (int32_t k = -1; k < kPowers && bits - k >= 1; ++k) {
    const int32_t step = k < 0 ? (unit_tiles - 1) / most + 1 : ((unit_tiles - 1) >> (bits - k)) + 1;
    const PartsAtCost other = parts_at_cost(shape, unit_tiles, step, shortest, even);
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
   and no more than workers. */
template <class P>
FM_BOTH EqualParts equal_parts(const FmPlanShape& shape, const Line<P>& line, int32_t filled) {
  const int32_t empty = line.units - filled;
  const P tiles = (line.total - static_cast<P>(line.units) * shape.fixed_cost) / filled;
  const P cost = tiles + shape.fixed_cost;
  const P share = (cost * filled + shape.workers - 1) / shape.workers;
  const int64_t most = fair_stretch(shape, share, shape.whole_speed);
  const int32_t unit_tiles = static_cast<int32_t>(tiles);
  const int32_t rounds = (filled - 1) / shape.workers + 1;
  if (static_cast<int64_t>(cost) * rounds <= most) {
    const bool as_on_the_line = line.whole && rounds == 1;
    return as_on_the_line ? EqualParts{} : EqualParts{unit_tiles, unit_tiles, 1, filled, empty, filled, rounds};
  }
  if (filled > shape.workers / 2) return {};
  const PartsAtCost best = best_parts(shape, tiles, filled);
  if (best.step >= unit_tiles || static_cast<int64_t>(best.step) + shape.fixed_cost > most) return {};
  return {best.step, unit_tiles, best.count, filled, empty, filled * best.count, 1};
}

/* How a unit that has tiles is cut. */
template <class P>
FM_BOTH Parts<P> parts_of_filled(const EqualParts& equal) {
  return {0, equal.step, equal.count, equal.tiles};
}

/* What comes before the unit that has `rank` others with tiles before it. Items are not counted. */
FM_BOTH Tally before_filled(const EqualParts& equal, int32_t rank) { return {0, rank, rank * equal.count}; }

/* a * b / c, of numbers from 0 on, rounded down. Few bits take less time. */
FM_BOTH int32_t product_over(int32_t a, int32_t b, int32_t c, int32_t more = 0) {
  if ((a | b) < 1 << 15) return static_cast<int32_t>((static_cast<uint32_t>(a) * b + more) / static_cast<uint32_t>(c));
  return static_cast<int32_t>((static_cast<int64_t>(a) * b + more) / c);
}

/* Workers that have parts. */
FM_BOTH int32_t busy(const EqualParts& equal) {
  return equal.each == 1 ? equal.parts : (equal.parts - 1) / equal.each + 1;
}

/* The workers that those are spread over: where few have parts, the first. */
FM_BOTH int32_t spread(const FmPlanShape& shape, const EqualParts& equal) {
  return busy(equal) > shape.workers / 2 ? shape.workers : busy(equal);
}

/* The worker that has the `k`-th turn of parts. */
FM_BOTH int32_t worker_of(const FmPlanShape& shape, const EqualParts& equal, int32_t k) {
  return product_over(k, spread(shape, equal), busy(equal));
}

/* Parts of the workers before `worker`. */
FM_BOTH int32_t parts_before(const FmPlanShape& shape, const EqualParts& equal, int32_t worker) {
  const int32_t over = spread(shape, equal), turns = product_over(worker, busy(equal), over, over - 1);
  return static_cast<int32_t>(smaller(int64_t{turns} * equal.each, equal.parts));
}

/* Empty units of the workers before `worker`. The last workers are those with one more than others. */
FM_BOTH int32_t empty_before(const FmPlanShape& shape, const EqualParts& equal, int32_t worker) {
  if (equal.empty == 0) return 0;
  const int32_t each = equal.empty / shape.workers;
  const int32_t fewer = shape.workers - equal.empty % shape.workers; /* workers that have no more than `each` */
  return worker * each + (worker > fewer ? worker - fewer : 0);
}

/* First item of a worker, 0 <= worker <= workers. */
FM_BOTH int32_t first_item(const FmPlanShape& shape, const EqualParts& equal, int32_t worker) {
  return parts_before(shape, equal, worker) + empty_before(shape, equal, worker);
}

/* The item of part `part` of all, whose unit has `empty` empty ones before it. */
FM_BOTH int32_t item_of_part(const FmPlanShape& shape, const EqualParts& equal, int32_t part, int32_t empty) {
  if (equal.empty == 0) return part;
  const int32_t worker = worker_of(shape, equal, part / equal.each);
  return part + empty_before(shape, equal, worker) + (empty + worker) / shape.workers;
}

/* The item of the empty unit that has `empty` others and `filled` units with tiles before it: in turn, from the last
   worker down. */
FM_BOTH int32_t item_of_empty(const FmPlanShape& shape, const EqualParts& equal, int32_t empty, int32_t filled) {
  const int32_t worker = shape.workers - 1 - empty % shape.workers, most = filled * equal.count;
  const int32_t begin = parts_before(shape, equal, worker), end = parts_before(shape, equal, worker + 1);
  const int32_t before = (end < most ? end : most) - (begin < most ? begin : most);
  return first_item(shape, equal, worker) + before + empty / shape.workers;
}

FM_BOTH Tally tally_of(const EqualParts& equal) {
  const int32_t items = equal.parts + equal.empty;
  return equal.count > 1 ? Tally{items, equal.filled, equal.parts} : Tally{items, 0, 0};
}

}  // namespace plan
}  // namespace ferromla
