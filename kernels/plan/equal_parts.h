// Units that have as many tiles each, cut into equal parts, one to a worker. Units without tiles do not count; each is an
// item that costs a worker little, and they are dealt out evenly. `crates/schedule/equal_parts.rs` is the same in Rust.
//
// Nothing here needs a running sum. Worker w has part w, if there are that many, and its turns of the empty units, so that
// no worker has two more of them than another. A worker's items stand in the order of their units.
#pragma once
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

/* Parts of a unit above which each costs more than it saves, unless it is long. */
constexpr int32_t kMostEqualParts = 32;

struct EqualParts {
  int32_t step;   /* tiles of a part, but for the last of a unit; 0: units are not dealt with this way */
  int32_t tiles;  /* of each unit that has any */
  int32_t count;  /* parts of such a unit */
  int32_t filled; /* units that have tiles */
  int32_t empty;  /* units that have none */
  int32_t parts;  /* of all units with tiles, no more than workers */
};

/* The parts of units of which `filled` have tiles, all as many, where they are no longer than even shares, or short
   anyway: those that the units would have without the empty ones. `line.whole` says whether with these whole units share
   out evenly; then there is nothing to do for units that would be whole without them, too. */
template <class P>
FM_BOTH EqualParts equal_parts(const FmPlanShape& shape, const Line<P>& line, int32_t filled) {
  const int32_t empty = line.units - filled;
  if (filled == 0 || filled > shape.workers / 2 || (line.whole && empty == 0)) return {};
  const P all_tiles = line.total - static_cast<P>(line.units) * shape.fixed_cost;
  const P tiles = all_tiles / filled, most = shape.workers / filled, low = shape.min_part;
  if (tiles * filled != all_tiles) return {};
  const P cost = tiles + shape.fixed_cost;
  const P share = (cost * filled + shape.workers - 1) / shape.workers;
  const int32_t unit_tiles = static_cast<int32_t>(tiles);
  /* Whole units would have a worker each, as there are two for one. */
  if (cost <= fair_stretch(shape, share)) {
    return line.whole ? EqualParts{} : EqualParts{unit_tiles, unit_tiles, 1, filled, empty, filled};
  }
  const P few = smaller(2 * low, (tiles + kMostEqualParts - 1) / kMostEqualParts);
  const P step = larger(larger((tiles + most - 1) / most, few), low);
  if (step >= tiles || step > larger(share, 2 * low)) return {};
  const int32_t count = static_cast<int32_t>((tiles - low) / step) + 1; /* the last part is no shorter than min_part */
  return {static_cast<int32_t>(step), unit_tiles, count, filled, empty, filled * count};
}

/* How a unit that has tiles is cut. */
template <class P>
FM_BOTH Parts<P> parts_of_filled(const EqualParts& equal) {
  return {0, equal.step, equal.count, equal.tiles};
}

/* What comes before the unit that has `rank` others with tiles before it. Items are not counted. */
FM_BOTH Tally before_filled(const EqualParts& equal, int32_t rank) { return {0, rank, rank * equal.count}; }

/* First item of a worker, 0 <= worker <= workers. The last workers are those with one empty unit more than others, as
   they have no part where there are fewer parts than workers. */
FM_BOTH int32_t first_item(const FmPlanShape& shape, const EqualParts& equal, int32_t worker) {
  const int32_t each = equal.empty / shape.workers;
  const int32_t fewer = shape.workers - equal.empty % shape.workers; /* workers that have no more than `each` */
  const int32_t parts = worker < equal.parts ? worker : equal.parts;
  return parts + worker * each + (worker > fewer ? worker - fewer : 0);
}

/* The item of part `part` of all, whose unit has `empty` empty ones before it. */
FM_BOTH int32_t item_of_part(const FmPlanShape& shape, const EqualParts& equal, int32_t part, int32_t empty) {
  return first_item(shape, equal, part) + (empty + part) / shape.workers;
}

/* The item of the empty unit that has `empty` others and `filled` units with tiles before it: in turn, from the last
   worker down. */
FM_BOTH int32_t item_of_empty(const FmPlanShape& shape, const EqualParts& equal, int32_t empty, int32_t filled) {
  const int32_t worker = shape.workers - 1 - empty % shape.workers;
  const bool part_before = worker < filled * equal.count;
  return first_item(shape, equal, worker) + (part_before ? 1 : 0) + empty / shape.workers;
}

FM_BOTH Tally tally_of(const EqualParts& equal) {
  const int32_t items = equal.parts + equal.empty;
  return equal.count > 1 ? Tally{items, equal.filled, equal.parts} : Tally{items, 0, 0};
}

}  // namespace plan
}  // namespace ferromla
