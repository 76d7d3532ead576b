//! The arithmetic of the planner: what a unit costs, where the shares of the workers end, into which parts
//! a unit is cut. `kernels/plan_algorithm.h` is the same for the device, name by name, with `fixed_parts.rs`, except that there
//! `kernels/plan/` finds the unit that a cut falls on: by search, or by asking the unit.
//!
//! Positions on the line are 64 bit, and nothing overflows within the limits that [`layout`](crate::layout())
//! checks: a unit has at most 2^25 tiles and costs less than 2^32, and there are fewer than 2^31 units.

use crate::fixed_parts::{
    is_in_steps, parts_by_count, step_log2, steps_of, stores_steps, tiles_of_part,
};
use crate::layout::DivCeil;
use crate::plan_layout::{
    FM_MAX_SPLITS, FM_PLAN_VERSION, FM_SLOTS_OF_WORKER, FM_SPLIT_AUTO, FM_TILE_TOKENS, FmMerge,
    FmPlanHeader, FmPlanLayout, FmPlanShape, FmWorkItem,
};

/// One request, one KV head, one block of query rows.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) request: i32,
    pub(crate) kv_head: i32,
    pub(crate) row_begin: i32,
    /// First query token of the request along q's token axis; 0 unless ragged or sparse.
    pub(crate) q_begin: i32,
    pub(crate) q_len: i32,
    /// Clamped.
    pub(crate) seq_len: i32,
    /// Sparse only, else 0: clamped.
    pub(crate) main_len: i32,
}

pub(crate) fn clamp_seq_len(shape: &FmPlanShape, seq_len: i32) -> i32 {
    seq_len.clamp(0, shape.max_seq_len)
}

/// Where the keys of a sparse token end. Those of the extra cache begin with a tile, so that no tile is of
/// both.
pub(crate) fn end_of_keys(main_len: i32, extra_len: i32) -> i64 {
    match extra_len {
        0 => main_len.into(),
        _ => {
            let tiles = i64::from(main_len).div_ceil_positive(FM_TILE_TOKENS);
            tiles * i64::from(FM_TILE_TOKENS) + i64::from(extra_len)
        }
    }
}

/// First query token and number of query tokens of a request of a ragged batch, from its two entries of
/// `qo_indptr`, whatever they hold.
pub(crate) fn query_range(shape: &FmPlanShape, begin: i32, end: i32) -> (i32, i32) {
    let begin = begin.clamp(0, shape.q_tokens);
    (begin, end.clamp(begin, shape.q_tokens) - begin)
}

/// Row blocks, and so units per KV head, of a request.
pub(crate) fn blocks_of(shape: &FmPlanShape, q_len: i32) -> i32 {
    let rows = i64::from(q_len) * i64::from(shape.group);
    rows.div_ceil_positive(shape.unit_rows) as i32
}

/// KV tiles that any row of the unit sees.
pub(crate) fn unit_tiles(shape: &FmPlanShape, unit: Unit) -> i32 {
    let (q_len, seq_len) = (i64::from(unit.q_len), i64::from(unit.seq_len));
    let mut visible = seq_len;
    if shape.causal != 0 {
        let rows = q_len * i64::from(shape.group);
        let row_end = i64::from(unit.row_begin) + i64::from(shape.unit_rows);
        if row_end < rows {
            let last_token = (row_end - 1) / i64::from(shape.group);
            visible = (seq_len - q_len + last_token + 1).max(0); // fewer than all
        }
    }
    visible.div_ceil_positive(FM_TILE_TOKENS) as i32
}

/// An even share of the work line for each worker.
pub(crate) fn even_share(total: i64, workers: i32) -> i64 {
    total.div_ceil_positive(workers).max(1)
}

/// Positions of the units on the line, as the device keeps them: `i64` in two words each, low word first.
#[derive(Clone, Copy)]
pub(crate) struct Starts<'a>(pub(crate) &'a [[i32; 2]]);

impl Starts<'_> {
    pub(crate) fn at(&self, unit: i32) -> i64 {
        let [low, high] = self.0[unit as usize];
        (i64::from(high) << 32) | i64::from(low as u32)
    }

    pub(crate) fn words(position: i64) -> [i32; 2] {
        [position as i32, (position >> 32) as i32]
    }
}

/// The units laid one after another: unit `u` stands at `start[u] .. start[u + 1]`, its fixed cost first,
/// then its tiles.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a> {
    pub(crate) start: Starts<'a>,
    pub(crate) total: i64,
    /// Cut `c` is wished for at `c * share`.
    pub(crate) share: i64,
    pub(crate) units: i32,
    /// `FM_SPLIT_AUTO`: no unit is cut.
    pub(crate) whole: bool,
}

impl Line<'_> {
    /// Where a unit begins and ends.
    fn span(&self, unit: i32) -> (i64, i64) {
        (self.start.at(unit), self.start.at(unit + 1))
    }

    pub(crate) fn tiles(&self, shape: &FmPlanShape, unit: i32) -> i32 {
        let (begin, end) = self.span(unit);
        (end - begin - i64::from(shape.fixed_cost)) as i32
    }
}

/// The parts a unit is cut into: inner part `j` begins at tile `origin + j * step`.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    origin: i64,
    step: i64,
    pub(crate) count: i32,
    tiles: i32,
}

impl Parts {
    /// Every `step` tiles of the unit, except that part `count - 1` ends with it.
    pub(crate) fn new(step: i64, count: i32, tiles: i32) -> Self {
        Self {
            origin: 0,
            step,
            count,
            tiles,
        }
    }

    pub(crate) fn whole(tiles: i32) -> Self {
        Self::new(0, 1, tiles)
    }

    /// First tile of part `j`, `0 <= j <= count`; the end of the unit for `j == count`.
    pub(crate) fn tile(&self, j: i32) -> i32 {
        if j == 0 {
            0
        } else if j >= self.count {
            self.tiles
        } else {
            (self.origin + i64::from(j) * self.step) as i32
        }
    }
}

/// The first cut that is at least `min_part` tiles into the unit whose tiles begin at `first_tile`.
fn first_inner_cut(shape: &FmPlanShape, line: &Line, first_tile: i64) -> i64 {
    (first_tile + i64::from(shape.min_part))
        .div_ceil_positive(line.share)
        .max(1)
}

/// The cuts that fall inside a unit, no nearer than `min_part` to its ends: as cuts are evenly spaced, a
/// closed range of them.
fn parts_at_shares(shape: &FmPlanShape, line: &Line, unit: i32) -> Parts {
    let (begin, end) = line.span(unit);
    let first_tile = begin + i64::from(shape.fixed_cost);
    let first = first_inner_cut(shape, line, first_tile);
    let end = end - i64::from(shape.min_part);
    let last = (end / line.share).min(i64::from(shape.workers) - 1);
    Parts {
        origin: (first - 1) * line.share - first_tile,
        step: line.share,
        count: (last - first + 1).max(0) as i32 + 1,
        tiles: line.tiles(shape, unit),
    }
}

pub(crate) fn parts_of(shape: &FmPlanShape, line: &Line, unit: i32) -> Parts {
    if shape.split_mode != FM_SPLIT_AUTO {
        parts_by_count(shape, line.tiles(shape, unit))
    } else if line.whole {
        Parts::whole(line.tiles(shape, unit))
    } else {
        parts_at_shares(shape, line, unit)
    }
}

/// Where a worker's stretch begins: at a part of a unit; at part 0 of unit `units` for the line's end.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) unit: i32,
    pub(crate) part: i32,
}

/// The last unit that begins at or before `x`.
fn unit_containing(line: &Line, x: i64) -> i32 {
    let (mut low, mut high) = (0, line.units - 1);
    while low < high {
        let middle = high - (high - low) / 2;
        if line.start.at(middle) <= x {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// The part boundary nearest to `x`, the lower of two equally near.
fn nearest_boundary(shape: &FmPlanShape, line: &Line, x: i64) -> Cut {
    let unit = unit_containing(line, x);
    let parts = parts_of(shape, line, unit);
    let first_tile = line.start.at(unit) + i64::from(shape.fixed_cost);
    let mut part = 0;
    if parts.count > 1 && x > first_tile {
        part = ((x - first_tile) / parts.step).min(i64::from(parts.count) - 1) as i32;
    }
    let last = part + 1 == parts.count;
    let boundary = |j| first_tile + i64::from(parts.tile(j));
    let below = if part == 0 {
        line.start.at(unit)
    } else {
        boundary(part)
    };
    let above = if last {
        line.start.at(unit + 1)
    } else {
        boundary(part + 1)
    };
    if x - below <= above - x {
        Cut { unit, part }
    } else if last {
        Cut {
            unit: unit + 1,
            part: 0,
        }
    } else {
        Cut {
            unit,
            part: part + 1,
        }
    }
}

/// The cut at `x` itself, unless a part would become shorter than `min_part`.
fn cut_at_share(shape: &FmPlanShape, line: &Line, cut: i32, x: i64) -> Cut {
    let unit = unit_containing(line, x);
    let (begin, end) = line.span(unit);
    let first_tile = begin + i64::from(shape.fixed_cost);
    let tile = x - first_tile;
    let tiles = end - first_tile;
    let near_start = tile < i64::from(shape.min_part);
    let near_end = tiles - tile < i64::from(shape.min_part);
    if !near_start && !near_end {
        let first = first_inner_cut(shape, line, first_tile);
        return Cut {
            unit,
            part: (i64::from(cut) - first + 1) as i32,
        };
    }
    let to_end = if near_start && near_end {
        2 * tile >= tiles
    } else {
        near_end
    };
    Cut {
        unit: unit + i32::from(to_end),
        part: 0,
    }
}

/// Whether units that stay whole get a worker each.
fn has_worker_each(shape: &FmPlanShape, line: &Line) -> bool {
    shape.split_mode == FM_SPLIT_AUTO && line.whole && line.units <= shape.workers
}

/// Where worker `cut` begins, `0 <= cut <= workers`.
pub(crate) fn cut_of(shape: &FmPlanShape, line: &Line, cut: i32) -> Cut {
    if cut == 0 || line.units == 0 {
        return Cut { unit: 0, part: 0 };
    }
    if cut == shape.workers {
        return Cut {
            unit: line.units,
            part: 0,
        };
    }
    if has_worker_each(shape, line) {
        let unit = (i64::from(cut) * i64::from(line.units)).div_ceil_positive(shape.workers);
        return Cut {
            unit: unit as i32,
            part: 0,
        };
    }
    let x = (i64::from(cut) * line.share).min(line.total);
    if shape.split_mode == FM_SPLIT_AUTO && !line.whole {
        cut_at_share(shape, line, cut, x)
    } else {
        nearest_boundary(shape, line, x)
    }
}

/// The longest stretch of whole units, or the longest of equal parts, that is about as good for a worker as an even share and
/// what cutting costs, `split`: a worker goes `speed` / 256 times faster than the machine divided by the workers.
pub(crate) fn fair_stretch(share: i64, speed: i64, split: i32) -> i64 {
    (share / 256).min(1 << 46) * speed + share % 256 * speed / 256 + i64::from(split)
}

/// What is left of the longest fair stretch `most` of whole units where parts may have workers of their own: being cut costs less. Units
/// that cost no more than `split_cost` stay whole all the same.
pub(crate) fn fair_beside_own_parts(shape: &FmPlanShape, most: i64) -> i64 {
    (most - i64::from(shape.own_parts_gain)).max(most.min(shape.split_cost.into()))
}

/// Whole units of a worker up to which it matters that others have one less: the last ones would be at work alone.
pub(crate) const MOST_ROUNDS: i32 = 3;

/// The same of whole units of different lengths on a line: while the others have work, the longest stretch goes no faster than
/// its share.
pub(crate) fn fair_uneven_stretch(shape: &FmPlanShape, share: i64) -> i64 {
    let speed = (i64::from(shape.whole_speed) + 256) / 2;
    fair_stretch(share, speed, shape.split_cost)
}

/// The longest stretch of whole units of which `filled` have tiles, of all on a line. Few ones, if each has a worker, get parts of a
/// common length otherwise, or are dealt out longest first.
pub(crate) fn fair_whole_stretch(shape: &FmPlanShape, line: &Line, filled: i32) -> i64 {
    let most = fair_uneven_stretch(shape, line.share);
    match are_few(shape, line.units) && filled <= shape.workers {
        true => fair_beside_own_parts(shape, most),
        false => most,
    }
}

/// A worker's stretch of whole units. `line.whole` is set.
pub(crate) fn whole_stretch(shape: &FmPlanShape, line: &Line, worker: i32) -> i64 {
    let begin = line.start.at(cut_of(shape, line, worker).unit);
    let end = line.start.at(cut_of(shape, line, worker + 1).unit);
    end - begin
}

/// The most units, and requests, with which the planner takes its time: they may be dealt out, or have parts of a common length.
pub(crate) const MOST_FEW_UNITS: i32 = 384;

/// What has lengths of its own: requests, or tokens with lists.
pub(crate) fn requests(shape: &FmPlanShape) -> i64 {
    i64::from(shape.batch) * i64::from(shape.sparse_q_len.max(1))
}

pub(crate) fn are_few(shape: &FmPlanShape, units: i32) -> bool {
    units <= MOST_FEW_UNITS && requests(shape) <= MOST_FEW_UNITS.into()
}

/// An even share of the units of a line of which `filled` have tiles, without the others.
pub(crate) fn share_of_filled(shape: &FmPlanShape, line: &Line, filled: i32) -> i64 {
    let empty = i64::from(line.units - filled) * i64::from(shape.fixed_cost);
    even_share(line.total - empty, shape.workers)
}

/// The share to cut at once units are to be cut: parts must not get shorter than `min_part`.
pub(crate) fn cutting_share(shape: &FmPlanShape, share: i64) -> i64 {
    share.max(shape.min_part.into())
}

/// Where the partial results of a unit's parts go: `each` of a part but for the last; and what its [`FmMerge`] says of steps.
#[derive(Clone, Copy)]
pub(crate) struct UnitSlots {
    first: i32,
    each: i32,
    steps: i32,
    all: i32,
    /// 0: none.
    step_log2: i32,
    /// What a whole unit's item says.
    of_whole: i32,
}

impl UnitSlots {
    pub(crate) const NONE: Self = Self {
        first: 0,
        each: 0,
        steps: 0,
        all: 0,
        step_log2: 0,
        of_whole: -1,
    };

    /// `before` counts what comes before the unit.
    pub(crate) fn new(
        shape: &FmPlanShape,
        layout: &FmPlanLayout,
        parts: &Parts,
        before: Tally,
    ) -> Self {
        let tiles = parts.tiles.into();
        if shape.steps == 0 {
            return Self {
                first: before.slots,
                each: 1,
                ..Self::NONE
            };
        }
        let step_log2 = step_log2(shape, tiles);
        if is_in_steps(shape, tiles) {
            Self {
                first: before.merges * shape.few_steps,
                each: (parts.step >> step_log2) as i32,
                steps: (tiles_of_part(shape, tiles) >> step_log2) as i32,
                all: steps_of(shape, tiles) as i32,
                step_log2,
                of_whole: match stores_steps(shape) && steps_of(shape, tiles) > 1 {
                    true => FM_SLOTS_OF_WORKER,
                    false => -1,
                },
            }
        } else {
            Self {
                first: layout.step_slots + before.slots,
                each: 1,
                steps: 1,
                all: parts.count,
                step_log2,
                ..Self::NONE
            }
        }
    }
}

/// Part `j` of a unit.
pub(crate) fn make_item(
    unit: Unit,
    parts: &Parts,
    j: i32,
    before: Tally,
    slots: UnitSlots,
) -> FmWorkItem {
    let whole = parts.count == 1;
    FmWorkItem {
        request: unit.request,
        kv_head: unit.kv_head,
        row_begin: unit.row_begin,
        q_begin: unit.q_begin,
        q_len: unit.q_len,
        seq_len: unit.seq_len,
        tile_begin: parts.tile(j),
        tile_end: parts.tile(j + 1),
        slot: if whole {
            slots.of_whole
        } else {
            slots.first + j * slots.each
        },
        merge: if whole { -1 } else { before.merges },
        main_len: unit.main_len,
        parts: parts.count | slots.step_log2 << 16,
    }
}

pub(crate) fn make_merge(unit: Unit, parts: &Parts, slots: UnitSlots) -> FmMerge {
    FmMerge {
        request: unit.request,
        kv_head: unit.kv_head,
        row_begin: unit.row_begin,
        q_begin: unit.q_begin,
        q_len: unit.q_len,
        first_slot: slots.first,
        parts: parts.count,
        steps: slots.steps,
        come: 0,
        there: 0,
        turn: 0,
        slots: slots.all,
        arrived: [[0; 2]; FM_MAX_SPLITS as usize],
    }
}

/// Items, merges and slots of the units so far.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) items: i32,
    pub(crate) merges: i32,
    pub(crate) slots: i32,
}

impl Tally {
    pub(crate) fn add(&mut self, parts: &Parts) {
        self.items += parts.count;
        if parts.count > 1 {
            self.merges += 1;
            self.slots += parts.count;
        }
    }
}

pub(crate) fn make_header(line: &Line, all: Tally) -> FmPlanHeader {
    FmPlanHeader {
        version: FM_PLAN_VERSION,
        items: all.items,
        merges: all.merges,
        slots: all.slots,
        whole: line.whole.into(),
        share: line.share.min(i32::MAX.into()) as i32,
        units: line.units,
        unused: 0,
        loading: [0; 2],
        reserved: [0; 6],
    }
}
