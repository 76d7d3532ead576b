// Parts dealt to the workers by size, in rounds of one to each worker: the longest parts first, then the shortest, then the
// longest of those left, and so on; of each round the longest part goes to whoever has least so far (deal.cuh). With two rounds
// the longest comes with the shortest. `crates/schedule/dealt.rs` is the same in Rust.
//
// Parts whose number is fixed (num_splits, batch_invariant) are, unless they are more than workers and about equally long: then they
// share out as well on a line, on which those of a unit lie together, so that they are not ready, and added up, all at once. Whole units
// are, where they would be cut on the line and dealt out no worker has much more than an even share.
#pragma once
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

/* More units are laid on a line: shares are long then, compared with parts. */
constexpr int32_t kMostDealtUnits = 512;
/* As are more parts of them, ... */
constexpr int32_t kMostDealtParts = 2048;
/* ... and those for more workers than any GPU has. */
constexpr int32_t kMostDealtWorkers = 256;

/* Whether parts, the longest of `longest` tiles, share out on a line: more parts than workers, of which as many to each make an
   eighth more than an even share at most. */
FM_BOTH bool shares_out_on_a_line(int32_t longest, int32_t items, int32_t workers, int64_t share) {
  const int64_t most = (static_cast<int64_t>(items) + workers - 1) / workers;
  return items > workers && most * longest * 8 <= share * 9;
}

/* So many parts, one item each, for so many workers. */
struct Deal {
  int32_t items;
  int32_t workers;

  FM_BOTH int32_t rounds() const { return (items + workers - 1) / workers; }
};

/* The round that is dealt after `step` others: the first, the last, the second, the second to last, and so on. */
FM_BOTH int32_t round_of_step(const Deal& deal, int32_t step) {
  return step % 2 == 0 ? step / 2 : deal.rounds() - 1 - step / 2;
}

/* First item of a worker, 0 <= worker <= workers. Its items are in the order of their ranks, one of each round. In the last round, the only
   short one, some have none: it is the second that is dealt, when the last worker has least, or the only one. */
FM_BOTH int32_t first_item(const Deal& deal, int32_t worker) {
  const int32_t rounds = deal.items / deal.workers, left = deal.items % deal.workers;
  const int32_t none = deal.workers - left;
  const int32_t extra = rounds == 0 ? (worker < left ? worker : left) : (worker > none ? worker - none : 0);
  return worker * rounds + extra;
}

/* Whether parts of few units may be dealt, as far as their number goes. */
FM_BOTH bool may_be_dealt(const Deal& deal) { return deal.items <= kMostDealtParts && deal.workers <= kMostDealtWorkers; }

/* Whether units are so few, and yet more than workers, that they may be dealt whole: if what each worker gets is as good as
   an even share and what cutting costs. */
FM_BOTH bool may_be_dealt_whole(const FmPlanShape& shape, int32_t units) {
  return shape.workers < units && are_few(shape, units);
}

/* The parts of a unit: so many of `step` tiles, and then one of `last`. */
struct DealtUnit {
  int32_t step;
  int32_t last;
  int32_t more;
  int32_t merges; /* of the units before it */

  FM_BOTH int32_t longest() const { return more > 0 ? step : last; }
};

/* How many whole units come before unit `of`: the longer ones and, of equally long ones, those before it. */
template <class Tiles>
FM_BOTH int32_t rank_of(int32_t units, int32_t of, const Tiles& tiles_at) {
  const int32_t tiles = tiles_at(of);
  int32_t rank = 0;
#pragma unroll 8
  for (int32_t i = 0; i < units; ++i) rank += tiles_at(i) > (i < of ? tiles - 1 : tiles);
  return rank;
}

}  // namespace plan
}  // namespace ferromla
