// Parts dealt to the workers by size: the longest first, from the first worker to the last and back again, as long as there
// are parts. `crates/schedule/dealt.rs` is the same in Rust.
//
// Parts whose number is fixed (num_splits, batch_invariant) are, unless they are about equally long: then they share out as
// well on a line, on which those of a unit lie together, so that they are not ready, and added up, all at once. Whole units
// are, where they would be cut on the line and dealt out no worker has much more than an even share.
#pragma once
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

/* More units are laid on a line: shares are long then, compared with parts. */
constexpr int32_t kMostDealtUnits = 512;
/* The same of units that are dealt whole, with which this takes its time. */
constexpr int32_t kMostDealtWhole = 256;

/* Whether parts, the longest of `longest` tiles, share out on a line: as many to each worker make an eighth more than an even
   share at most. */
FM_BOTH bool shares_out_on_a_line(int32_t longest, int32_t items, int32_t workers, int64_t share) {
  const int64_t most = (static_cast<int64_t>(items) + workers - 1) / workers;
  return most * longest * 8 <= share * 9;
}

/* So many items for so many workers. */
struct Deal {
  int32_t items;
  int32_t workers;
};

/* First item of a worker, 0 <= worker <= workers. In the last round some have none: in even rounds, counted from 0, the
   last ones, in odd rounds the first. */
FM_BOTH int32_t first_item(const Deal& deal, int32_t worker) {
  const int32_t rounds = deal.items / deal.workers, left = deal.items % deal.workers;
  const int32_t none = deal.workers - left;
  const int32_t extra = rounds % 2 == 0 ? (worker < left ? worker : left) : (worker > none ? worker - none : 0);
  return worker * rounds + extra;
}

/* The worker whose turn it is in a round, or the turn of a worker: there and back again. */
FM_BOTH int32_t there_or_back(const Deal& deal, int32_t round, int32_t turn) {
  return round % 2 == 0 ? turn : deal.workers - 1 - turn;
}

/* The item of the part that `rank` others come before. */
FM_BOTH int32_t item_of_rank(const Deal& deal, int32_t rank) {
  const int32_t round = rank / deal.workers, turn = rank % deal.workers;
  return first_item(deal, there_or_back(deal, round, turn)) + round;
}

/* Whether units are so few, and yet more than workers, that they may be dealt whole. */
FM_BOTH bool may_be_dealt_whole(int32_t units, int32_t workers) { return workers < units && units <= kMostDealtWhole; }

/* Whether what a worker gets of whole units is as good for it as an even share and what cutting costs. `tiles`: of units by rank. */
template <class Tiles>
FM_BOTH bool load_is_fair(const FmPlanShape& shape, const Deal& deal, int32_t worker, int64_t share, const Tiles& tiles) {
  int64_t load = 0;
  for (int32_t round = 0; round * deal.workers < deal.items; ++round) {
    const int32_t rank = round * deal.workers + there_or_back(deal, round, worker);
    if (rank < deal.items) load += static_cast<int64_t>(tiles(rank)) + shape.fixed_cost;
  }
  return load <= share + shape.split_cost;
}

/* The parts of a unit: so many of `step` tiles, and then one of `last`. */
struct DealtUnit {
  int32_t step;
  int32_t last;
  int32_t more;
  int32_t merges; /* of the units before it */

  FM_BOTH int32_t longest() const { return more > 0 ? step : last; }
};

/* How many parts come before one of `tiles` tiles of unit `of`: the longer ones and, of equally long ones, those of units
   before it. Of its own unit only longer ones are counted. */
template <class Units>
FM_BOTH int32_t rank_of(const Units& units, int32_t count, int32_t of, int32_t tiles) {
  int32_t rank = 0;
  for (int32_t i = 0; i < count; ++i) {
    const DealtUnit unit = units[i];
    const int32_t shorter = i < of ? tiles - 1 : tiles; /* than what comes before */
    rank += (unit.step > shorter ? unit.more : 0) + (unit.last > shorter ? 1 : 0);
  }
  return rank;
}

}  // namespace plan
}  // namespace ferromla
