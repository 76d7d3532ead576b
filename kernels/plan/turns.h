// Parts of units taken in turn: each worker has one, or the next few whole units, and its turns of the empty units, so that no
// worker has two more of these than another; an empty unit is an item that costs a worker little. A worker's items stand in the
// order of their units. `crates/schedule/turns.rs` is the same in Rust.
//
// Where most workers have parts, those without are spread among them: with all of them at the end a launch reads up to a tenth less
// in the same time, as the multiprocessors that have work are not spread evenly over the GPU then.
#pragma once
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

struct Turns {
  int32_t parts; /* of all units with tiles */
  int32_t empty; /* units that have none */
  int32_t each;  /* parts of a worker: 1, or more where units are whole */
};

FM_BOTH int32_t items_of(const Turns& turns) { return turns.parts + turns.empty; }

/* a * b / c, of numbers from 0 on, rounded down. Few bits take less time. */
FM_BOTH int32_t product_over(int32_t a, int32_t b, int32_t c, int32_t more = 0) {
  if ((a | b) < 1 << 15) return static_cast<int32_t>((static_cast<uint32_t>(a) * b + more) / static_cast<uint32_t>(c));
  return static_cast<int32_t>((static_cast<int64_t>(a) * b + more) / c);
}

/* Workers that have parts. */
FM_BOTH int32_t busy(const Turns& turns) {
  return turns.each == 1 ? turns.parts : (turns.parts - 1) / turns.each + 1;
}

/* The workers that those are spread over: where few have parts, the first. */
FM_BOTH int32_t spread(const FmPlanShape& shape, const Turns& turns) {
  return busy(turns) > shape.workers / 2 ? shape.workers : busy(turns);
}

/* The worker that has the `k`-th turn of parts. */
FM_BOTH int32_t worker_of(const FmPlanShape& shape, const Turns& turns, int32_t k) {
  return product_over(k, spread(shape, turns), busy(turns));
}

/* Parts of the workers before `worker`. */
FM_BOTH int32_t parts_before(const FmPlanShape& shape, const Turns& turns, int32_t worker) {
  const int32_t over = spread(shape, turns), before = product_over(worker, busy(turns), over, over - 1);
  return static_cast<int32_t>(smaller(int64_t{before} * turns.each, turns.parts));
}

/* Empty units of the workers before `worker`. The last workers are those with one more than others. */
FM_BOTH int32_t empty_before(const FmPlanShape& shape, const Turns& turns, int32_t worker) {
  if (turns.empty == 0) return 0;
  const int32_t each = turns.empty / shape.workers;
  const int32_t fewer = shape.workers - turns.empty % shape.workers; /* workers that have no more than `each` */
  return worker * each + (worker > fewer ? worker - fewer : 0);
}

/* First item of a worker, 0 <= worker <= workers. */
FM_BOTH int32_t first_item(const FmPlanShape& shape, const Turns& turns, int32_t worker) {
  return parts_before(shape, turns, worker) + empty_before(shape, turns, worker);
}

/* The item of part `part` of all, whose unit has `empty` empty ones before it. */
FM_BOTH int32_t item_of_part(const FmPlanShape& shape, const Turns& turns, int32_t part, int32_t empty) {
  if (turns.empty == 0) return part;
  const int32_t worker = worker_of(shape, turns, part / turns.each);
  return part + empty_before(shape, turns, worker) + (empty + worker) / shape.workers;
}

/* The item of the empty unit that has `empty` others and `parts` parts before it: in turn, from the last worker down. */
FM_BOTH int32_t item_of_empty(const FmPlanShape& shape, const Turns& turns, int32_t empty, int32_t parts) {
  const int32_t worker = shape.workers - 1 - empty % shape.workers;
  const int32_t begin = parts_before(shape, turns, worker), end = parts_before(shape, turns, worker + 1);
  const int32_t before = (end < parts ? end : parts) - (begin < parts ? begin : parts);
  return first_item(shape, turns, worker) + before + empty / shape.workers;
}

}  // namespace plan
}  // namespace ferromla
