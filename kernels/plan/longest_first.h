// Longest first: few units that would be cut at even shares are cut into parts no longer than such a share instead, which are dealt out,
// the longest first, to the workers that have least so far (longest processing time first, Graham 1969). What is shorter than a share
// stays whole, and what is longer has few parts, so that few workers have the end of one unit and the beginning of another.
//
// That goes in rounds: of the workers that have no more than the one with least will have, whoever has least gets the longest part that is
// left, the next one the next, and so on.
// `crates/schedule/longest_first.rs` is the same in Rust; how threads do it is in longest_first.cuh.
#pragma once
#include "../plan_algorithm.h"
#include "dealt.h"

namespace ferromla {
namespace plan {

/* Longer shares and costs, in tiles, are left to the line: what a worker has is added up in 24 bits. */
constexpr int32_t kMostDealtTiles = 1 << 14;

/* Being cut costs units of 16 rows little. Of more rows so many, of requests of as many query tokens each, are dealt out, if they are no
   more than so many to a worker. */
constexpr int32_t kRowsCutAtEase = 16;
constexpr int32_t kMostDealtOutUnits = 640;
constexpr int32_t kMostDealtOutToAWorker = 5;

/* Whether units, and requests, are so few that they may be dealt out if they are to be cut. */
FM_BOTH bool may_be_dealt_out(const FmPlanShape& shape, int32_t units) {
  if (shape.split_mode != FM_SPLIT_AUTO || shape.workers > kMostDealtWorkers) return false;
  if (has_few_requests(shape)) return units <= kMostFewUnits;
  const int32_t most = kMostDealtOutToAWorker * shape.workers;
  return shape.ragged == 0 && shape.unit_rows > kRowsCutAtEase && units <= (most < kMostDealtOutUnits ? most : kMostDealtOutUnits);
}

struct LongestFirst {
  int32_t step;  /* tiles of each part of a unit but its last; 0: units are not dealt out */
  int32_t least; /* of the last part of a unit that is cut */
  int32_t most;  /* what a worker may have in the end */

  /* How many parts of a unit come before its last one: no more than there may be workers, which are too many. */
  FM_BOTH int32_t parts_before_last(int32_t tiles) const {
    const int32_t beyond = tiles - least;
    if (beyond < step) return 0;
    return beyond >= kMostDealtWorkers * step ? kMostDealtWorkers : static_cast<uint32_t>(beyond) / static_cast<uint32_t>(step);
  }
};

/* Of units of which `filled` have tiles. `common`: the length of their parts if they can all have such parts, one to a worker; else 0. */
template <class P>
FM_BOTH LongestFirst longest_first(const FmPlanShape& shape, const Line<P>& line, int32_t filled, P common) {
  if (line.whole || !may_be_dealt_out(shape, line.units)) return {0, 0, 0};
  const P all = share_of_filled(shape, line, filled);
  const int32_t low = shape.min_part, fixed = shape.fixed_cost;
  if (all > kMostDealtTiles || fixed > kMostDealtTiles || low > kMostDealtTiles) return {0, 0, 0};
  const int32_t share = all < 1 ? 1 : static_cast<int32_t>(all);
  const auto larger = [](int32_t a, int32_t b) { return a < b ? b : a; };
  /* Less than what cuts at even shares cost, and enough less than with parts of a common length, which nobody has two of. */
  const int64_t most = common > 0 ? (common + fixed) * 7 / 8 : int64_t{share} + shape.split_cost - shape.own_parts_gain + fixed / 2;
  /* Units that are cut cost more than once: about half of the parts are shorter. */
  return {larger(share - fixed / 2, low), larger(fixed / 2 + 1, low), static_cast<int32_t>(clamp(most, 0, 1 << 24))};
}

}  // namespace plan
}  // namespace ferromla
