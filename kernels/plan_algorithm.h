// The arithmetic of the planner, for host and device: what a unit costs, where the shares of the workers
// end, into which parts a unit is cut. Pure functions of one unit or one cut; who calls them for which unit
// is the business of plan.cu. `crates/schedule/algorithm.rs` is the same in Rust, name by name, and a test
// compares the plans of both byte by byte.
//
// Everything that multiplies or sums is 64 bit. With the limits that the host checks (every field of
// FmPlanShape in [0, 2^31), units and items below 2^31) no expression here overflows: a unit has at most
// 2^25 tiles and costs less than 2^32, so the line is shorter than 2^63.
#pragma once
#include "plan_layout.h"

#if defined(__CUDACC__)
#define FM_BOTH __host__ __device__ __forceinline__
#else
#define FM_BOTH inline
#endif

namespace ferromla {
namespace plan {

FM_BOTH int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FM_BOTH int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FM_BOTH int64_t clamp(int64_t x, int64_t low, int64_t high) { return larger(low, smaller(x, high)); }
/* For a >= 0, b > 0. */
FM_BOTH int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* One request, one KV head, one block of query rows. */
struct Unit {
  int32_t request;
  int32_t kv_head;
  int32_t row_begin;
};

FM_BOTH Unit unit_at(const FmPlanShape& shape, int32_t blocks, int32_t unit) {
  const int32_t head = unit / blocks; /* of all requests */
  return {head / shape.kv_heads, head % shape.kv_heads, (unit % blocks) * shape.unit_rows};
}

FM_BOTH int32_t clamp_seq_len(const FmPlanShape& shape, int32_t seq_len) {
  return static_cast<int32_t>(clamp(seq_len, 0, shape.max_seq_len));
}

/* KV tiles that any row of the unit sees. `seq_len` is clamped already. */
FM_BOTH int32_t unit_tiles(const FmPlanShape& shape, int32_t row_begin, int32_t seq_len) {
  int64_t visible = seq_len;
  if (shape.causal) {
    const int64_t rows = int64_t{shape.q_len} * shape.group;
    const int64_t row_end = smaller(int64_t{row_begin} + shape.unit_rows, rows);
    const int64_t last_token = (row_end - 1) / shape.group;
    visible = clamp(int64_t{seq_len} - shape.q_len + last_token + 1, 0, seq_len);
  }
  return static_cast<int32_t>(ceil_div(visible, FM_TILE_TOKENS));
}

/* An even share of the work line for each worker. */
FM_BOTH int64_t even_share(int64_t total, int32_t workers) { return larger(ceil_div(total, workers), 1); }

/* The units laid one after another: unit u stands at start[u] .. start[u + 1], its fixed cost first, then
   its tiles. */
struct Line {
  const int64_t* start; /* [units + 1] */
  int64_t total;
  int64_t share;  /* cut c is wished for at c * share */
  int32_t units;
  int32_t whole;  /* FM_SPLIT_AUTO: no unit is cut */
};

/* The parts a unit is cut into: inner part j begins at tile origin + j * step. */
struct Parts {
  int64_t origin;
  int64_t step;
  int32_t count;
  int32_t tiles;
};

/* First tile of part j, 0 <= j <= count; the end of the unit for j == count. */
FM_BOTH int32_t part_tile(const Parts& parts, int32_t j) {
  if (j == 0) return 0;
  return j >= parts.count ? parts.tiles : static_cast<int32_t>(parts.origin + j * parts.step);
}

FM_BOTH int32_t line_tiles(const FmPlanShape& shape, const Line& line, int32_t unit) {
  return static_cast<int32_t>(line.start[unit + 1] - line.start[unit] - shape.fixed_cost);
}

/* The cuts that fall inside a unit, no nearer than min_part to its ends: as cuts are evenly spaced, a
   closed range of them. */
FM_BOTH Parts parts_at_shares(const FmPlanShape& shape, const Line& line, int32_t unit) {
  const int64_t first_tile = line.start[unit] + shape.fixed_cost;
  const int64_t first = larger(1, ceil_div(first_tile + shape.min_part, line.share));
  const int64_t last =
      smaller(shape.workers - 1, (line.start[unit + 1] - shape.min_part) / line.share);
  return {(first - 1) * line.share - first_tile, line.share,
          static_cast<int32_t>(larger(last - first + 1, 0)) + 1, line_tiles(shape, line, unit)};
}

/* Even parts, as many as the mode asks for; rounding up their length may leave fewer. */
FM_BOTH Parts parts_by_count(const FmPlanShape& shape, const Line& line, int32_t unit) {
  const int32_t tiles = line_tiles(shape, line, unit);
  if (tiles == 0) return {0, 0, 1, 0};
  const int64_t wanted =
      shape.split_mode == FM_SPLIT_FIXED
          ? clamp(shape.num_splits, 1, tiles)
          : clamp(ceil_div(tiles, FM_INVARIANT_TILES), 1, FM_MAX_INVARIANT_PARTS);
  const int64_t step = ceil_div(tiles, wanted);
  return {0, step, static_cast<int32_t>(ceil_div(tiles, step)), tiles};
}

FM_BOTH Parts parts_of(const FmPlanShape& shape, const Line& line, int32_t unit) {
  if (shape.split_mode != FM_SPLIT_AUTO) return parts_by_count(shape, line, unit);
  if (line.whole) return {0, 0, 1, line_tiles(shape, line, unit)};
  return parts_at_shares(shape, line, unit);
}

/* Where a worker's stretch begins: at a part of a unit; at part 0 of unit `units` for the line's end. */
struct Cut {
  int32_t unit;
  int32_t part;
};

/* The last unit that begins at or before x. */
FM_BOTH int32_t unit_containing(const Line& line, int64_t x) {
  int32_t low = 0;
  int32_t high = line.units - 1;
  while (low < high) {
    const int32_t middle = high - (high - low) / 2;
    if (line.start[middle] <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/* The part boundary nearest to x, the lower of two equally near. */
FM_BOTH Cut nearest_boundary(const FmPlanShape& shape, const Line& line, int64_t x) {
  const int32_t unit = unit_containing(line, x);
  const Parts parts = parts_of(shape, line, unit);
  const int64_t first_tile = line.start[unit] + shape.fixed_cost;
  int32_t part = 0;
  if (parts.count > 1 && x > first_tile) {
    part = static_cast<int32_t>(smaller((x - first_tile) / parts.step, parts.count - 1));
  }
  const bool last = part + 1 == parts.count;
  const int64_t below = part == 0 ? line.start[unit] : first_tile + part_tile(parts, part);
  const int64_t above = last ? line.start[unit + 1] : first_tile + part_tile(parts, part + 1);
  if (x - below <= above - x) return {unit, part};
  return last ? Cut{unit + 1, 0} : Cut{unit, part + 1};
}

/* The cut at x itself, unless a part would become shorter than min_part. */
FM_BOTH Cut cut_at_share(const FmPlanShape& shape, const Line& line, int32_t cut, int64_t x) {
  const int32_t unit = unit_containing(line, x);
  const int64_t first_tile = line.start[unit] + shape.fixed_cost;
  const int64_t tile = x - first_tile;
  const int64_t tiles = line.start[unit + 1] - first_tile;
  const bool near_start = tile < shape.min_part;
  const bool near_end = tiles - tile < shape.min_part;
  if (!near_start && !near_end) {
    const int64_t first = larger(1, ceil_div(first_tile + shape.min_part, line.share));
    return {unit, static_cast<int32_t>(cut - first + 1)};
  }
  const bool to_end = near_start && near_end ? 2 * tile >= tiles : near_end;
  return {unit + (to_end ? 1 : 0), 0};
}

/* Where worker `cut` begins, 0 <= cut <= workers. */
FM_BOTH Cut cut_of(const FmPlanShape& shape, const Line& line, int32_t cut) {
  if (cut == 0 || line.units == 0) return {0, 0};
  if (cut == shape.workers) return {line.units, 0};
  const int64_t x = smaller(cut * line.share, line.total);
  const bool at_share = shape.split_mode == FM_SPLIT_AUTO && !line.whole;
  return at_share ? cut_at_share(shape, line, cut, x) : nearest_boundary(shape, line, x);
}

/* Whether a worker's stretch of whole units is about as good as an even share. `line.whole` is set. */
FM_BOTH bool whole_stretch_is_fair(const FmPlanShape& shape, const Line& line, int32_t worker) {
  const int64_t begin = line.start[cut_of(shape, line, worker).unit];
  const int64_t end = line.start[cut_of(shape, line, worker + 1).unit];
  return end - begin <= line.share + shape.split_cost;
}

/* The share to cut at once units are to be cut: parts must not get shorter than min_part. */
FM_BOTH int64_t cutting_share(const FmPlanShape& shape, int64_t share) {
  return larger(share, shape.min_part);
}

/* Part j of a unit. `first_slot` is that of part 0. */
FM_BOTH FmWorkItem make_item(const FmPlanShape& shape, const Unit& unit, int32_t seq_len,
                             const Parts& parts, int32_t j, int32_t first_slot) {
  FmWorkItem item{};
  item.request = unit.request;
  item.kv_head = unit.kv_head;
  item.row_begin = unit.row_begin;
  item.q_len = shape.q_len;
  item.seq_len = seq_len;
  item.tile_begin = part_tile(parts, j);
  item.tile_end = part_tile(parts, j + 1);
  item.slot = parts.count > 1 ? first_slot + j : -1;
  return item;
}

FM_BOTH FmMerge make_merge(const FmPlanShape& shape, const Unit& unit, const Parts& parts,
                           int32_t first_slot) {
  FmMerge merge{};
  merge.request = unit.request;
  merge.kv_head = unit.kv_head;
  merge.row_begin = unit.row_begin;
  merge.q_len = shape.q_len;
  merge.first_slot = first_slot;
  merge.parts = parts.count;
  return merge;
}

/* Items and merges of a stretch of units. Slots follow: units that are not cut have one item and none. */
struct Tally {
  int64_t packed; /* merges << 32 | items, so that one scan sums both */
};

FM_BOTH Tally tally_of(const Parts& parts) {
  return {(int64_t{parts.count > 1} << 32) + parts.count};
}
FM_BOTH int32_t items_of(Tally tally) { return static_cast<int32_t>(tally.packed & 0xffffffff); }
FM_BOTH int32_t merges_of(Tally tally) { return static_cast<int32_t>(tally.packed >> 32); }
FM_BOTH int32_t slots_of(Tally tally, int32_t units) {
  return items_of(tally) - (units - merges_of(tally));
}

FM_BOTH FmPlanHeader make_header(const Line& line, Tally all) {
  FmPlanHeader header{};
  header.version = FM_PLAN_VERSION;
  header.items = items_of(all);
  header.merges = merges_of(all);
  header.slots = slots_of(all, line.units);
  header.whole = line.whole;
  header.share = static_cast<int32_t>(smaller(line.share, INT32_MAX));
  return header;
}

}  // namespace plan
}  // namespace ferromla
