// Few units of different lengths, up to seven to eight workers, cut into parts of which each has a worker of its own: no part is
// longer than one common length, the least with which there are no more parts than workers. So nobody has the end of one unit and
// the beginning of the next, as with cuts where the even shares end. `crates/schedule/common_parts.rs` is the same in Rust;
// how threads find the length is in common_parts.cuh and large.cuh.
#pragma once
#include "../plan_algorithm.h"
#include "equal_parts.h"
#include "turns.h"

namespace ferromla {
namespace plan {

/* Parts of a unit above which each costs more than it saves, unless it is long. */
constexpr int32_t kMostShortParts = 32;
/* More than any GPU has. Sums of parts of so many fit 16 bits, with as many more for each unit that has more than kMostShortParts. */
constexpr int32_t kMostCommonWorkers = 1024;

/* Whether units of which `filled` have tiles may be cut this way, as far as their numbers go: most of them can have more than a part. */
template <class P>
FM_BOTH bool may_have_common_length(const FmPlanShape& shape, const Line<P>& line, int32_t filled) {
  return !line.whole && are_few(shape, line.units) && shape.workers <= kMostCommonWorkers && filled > 0 &&
         8 * filled <= 7 * shape.workers;
}

/* The lengths that may be the common one, least to most. */
template <class P>
struct CommonSearch {
  P least;
  P most;  /* may be below least */
  P equal; /* tiles of each unit that has any, if they may all have as many; else 0 */
};

/* Of units of which `filled` have tiles: from the least that can do to what is about as good for a worker as an even share and what
   cutting at even shares costs. */
template <class P>
FM_BOTH CommonSearch<P> common_search(const FmPlanShape& shape, const Line<P>& line, int32_t filled, P longest_line) {
  const P tiles = line.total - static_cast<P>(line.units) * shape.fixed_cost;
  const P least = (tiles + shape.workers - 1) / shape.workers;
  const int64_t most = fair_uneven_stretch(shape, share_of_filled(shape, line, filled)) - shape.fixed_cost;
  const P each = tiles / static_cast<P>(filled), equal = each * static_cast<P>(filled) == tiles ? each : 0;
  return {least < shape.min_part ? shape.min_part : least, static_cast<P>(smaller(most, longest_line)), equal};
}

/* `parts` of a unit none of which is longer than `longest`; more than any workers where these are so many that each costs more than it
   saves. */
template <class P>
FM_BOTH P parts_counted(const FmPlanShape& shape, P longest, P parts) {
  const bool many = parts > kMostShortParts && longest < int64_t{2} * shape.min_part;
  return parts + (many ? kMostCommonWorkers : 0);
}

/* The parts of a unit none of which is longer than `longest`, but for the last one, which takes what would be shorter than min_part. */
template <class P>
FM_BOTH Parts<P> parts_up_to(const FmPlanShape& shape, P longest, int32_t tiles) {
  if (tiles <= longest) return {0, 0, 1, tiles};
  const int32_t count = (tiles - 1) / static_cast<int32_t>(longest) + 1;
  const int32_t even = (tiles - 1) / count + 1, step = even < shape.min_part ? shape.min_part : even;
  return {0, static_cast<P>(step), (tiles - shape.min_part) / step + 1, tiles};
}

/* What comes before a unit, or all there is, of units of which some have no tiles: parts of those that have, units that are cut,
   units that have tiles. */
struct CommonTally {
  int32_t parts;
  int32_t cut;
  int32_t filled;
};

FM_BOTH Tally tally_of(const CommonTally& before) {
  return {before.parts, before.cut, before.parts - (before.filled - before.cut)};
}

}  // namespace plan
}  // namespace ferromla
