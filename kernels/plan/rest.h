// Units that are equal and more than workers: each worker has as many whole ones, and those that are left are cut into parts, one to a
// worker. So are lists of FM_SPLIT_REST, which are equal since no lengths are given, if a part takes less time than one of them, and
// units of many rows that would be cut at even shares (equal_parts.h). `crates/schedule/rest.rs` is the same in Rust.
#pragma once
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

/* Whole units of a worker above which one more does not count. */
constexpr int32_t kMostWholeBeforeRest = 128;

struct Rest {
  int32_t each;  /* whole units of a worker */
  int32_t units; /* that are cut; 0: none is */
  int32_t count; /* parts of each of these */
  int32_t step;  /* tiles of a part, but for the last */
  int32_t tiles; /* of a unit */

  FM_BOTH int32_t cut() const { return units * count; }
  /* The first item of a worker. After the last one: how many items there are. */
  FM_BOTH int32_t first_item(int32_t worker) const {
    return worker * each + static_cast<int32_t>(smaller(worker, cut()));
  }
  /* Of a unit of a worker's whole ones. */
  FM_BOTH int32_t item_of_whole(int32_t unit) const { return first_item(unit / each) + unit % each; }
  /* Of a part of those that are cut, in their order: the last of its worker. */
  FM_BOTH int32_t item_of_part(int32_t part) const { return first_item(part) + each; }
  FM_BOTH Tally before(int32_t rank) const { return {0, rank, rank * count}; }
};

/* `tiles`: of each unit. Whether it pays is for others to say. */
FM_BOTH Rest rest_of(const FmPlanShape& shape, int32_t units, int32_t tiles) {
  const int32_t each = units / shape.workers, left = units % shape.workers;
  const Rest none{each, 0, 0, 0, tiles};
  if (each == 0 || each > kMostWholeBeforeRest || left == 0 || tiles == 0) return none;
  const int32_t most = static_cast<int32_t>(smaller(shape.workers / left, tiles / shape.min_part));
  if (most < 2) return none;
  const int32_t step = (tiles + most - 1) / most;
  return {each, left, (tiles - shape.min_part) / step + 1, step, tiles}; /* the last part is no shorter than min_part */
}

/* Of lists of so many tiles. */
FM_BOTH Rest rest_of_lists(const FmPlanShape& shape, int32_t units, int32_t tiles) {
  const Rest rest = rest_of(shape, units, tiles);
  const bool pays = rest.units > 0 && int64_t{rest.step} + shape.split_cost < tiles;
  return pays ? rest : Rest{rest.each, 0, 0, 0, tiles};
}

/* Of units of many rows: none where that is no better than leaving them whole, if that is what else is done, or than cutting them at
   even shares. */
FM_BOTH Rest rest_beside_whole(const FmPlanShape& shape, int32_t units, int32_t tiles, bool whole) {
  if (shape.unit_rows < FM_TILE_ROWS) return {};
  const Rest rest = rest_of(shape, units, tiles);
  const int64_t cost = int64_t{tiles} + shape.fixed_cost, share = (cost * units + shape.workers - 1) / shape.workers;
  const int64_t last = int64_t{rest.step} + shape.fixed_cost;
  /* The whole ones that are left would be at work alone: all that a worker gains by that counts. */
  const int64_t speed = 2 * int64_t{shape.whole_speed} - 256;
  const bool pays = whole ? (last + shape.equal_split_cost / 2) * speed < cost * 256
                          : rest.each * cost + last <= share + shape.split_cost - shape.own_parts_gain;
  return rest.units > 0 && pays ? rest : Rest{};
}

}  // namespace plan
}  // namespace ferromla
