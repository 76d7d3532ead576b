//! Units that have as many tiles each, cut into equal parts, one to a worker. Units without tiles do not count;
//! each is an item that costs a worker little, and they are dealt out evenly. `kernels/plan/equal_parts.h` is
//! the same for the device.
//!
//! Nothing here needs a running sum. Worker `w` has part `w`, if there are that many, and its turns of the empty
//! units, so that no worker has two more of them than another. A worker's items stand in the order of their units.

use crate::algorithm::{Line, Parts, Tally, even_share, fair_stretch};
use crate::layout::DivCeil;
use crate::plan_layout::FmPlanShape;

/// Parts of a unit above which each costs more than it saves, unless it is long.
const MOST_EQUAL_PARTS: i32 = 32;

/// The shortest equal part of a unit, in tiles, however many workers there are.
pub(crate) fn shortest_part(tiles: i64, min_part: i32) -> i64 {
    let low = i64::from(min_part);
    let few = tiles.div_ceil_positive(MOST_EQUAL_PARTS).min(2 * low);
    few.max(low)
}

#[derive(Clone, Copy)]
pub(crate) struct EqualParts {
    /// Tiles of a part, but for the last of a unit.
    pub(crate) step: i32,
    /// Of each unit that has any.
    pub(crate) tiles: i32,
    /// Parts of such a unit.
    count: i32,
    /// Units that have tiles.
    filled: i32,
    /// Units that have none.
    empty: i32,
    /// Of all units with tiles, no more than workers.
    parts: i32,
}

/// The parts of units of which `filled` have tiles, all as many, where they are no longer than even shares, or
/// short anyway: those that the units would have without the empty ones. `line.whole` says whether with these
/// whole units share out evenly; then there is nothing to do for units that would be whole without them, too.
pub(crate) fn equal_parts(shape: &FmPlanShape, line: &Line, filled: i32) -> Option<EqualParts> {
    let empty = line.units - filled;
    if filled == 0 || filled > shape.workers / 2 || (line.whole && empty == 0) {
        return None;
    }
    let all_tiles = line.total - i64::from(line.units) * i64::from(shape.fixed_cost);
    let tiles = all_tiles / i64::from(filled);
    if tiles * i64::from(filled) != all_tiles {
        return None;
    }
    let low = i64::from(shape.min_part);
    let cost = tiles + i64::from(shape.fixed_cost);
    let share = even_share(cost * i64::from(filled), shape.workers);
    let cut_into = |step: i64, count: i32| EqualParts {
        step: step as i32,
        tiles: tiles as i32,
        count,
        filled,
        empty,
        parts: filled * count,
    };
    // Whole units would have a worker each, as there are two for one.
    if cost <= fair_stretch(shape, share) {
        return (!line.whole).then_some(cut_into(tiles, 1));
    }
    let step = tiles
        .div_ceil_positive(shape.workers / filled)
        .max(shortest_part(tiles, shape.min_part));
    if step >= tiles || step > share.max(2 * low) {
        return None;
    }
    let count = ((tiles - low) / step) as i32 + 1; // the last part is no shorter than min_part
    Some(cut_into(step, count))
}

impl EqualParts {
    /// How a unit that has tiles is cut.
    pub(crate) fn parts_of_filled(&self) -> Parts {
        Parts::new(self.step.into(), self.count, self.tiles)
    }

    /// What comes before the unit that has `rank` others with tiles before it. Items are not counted.
    pub(crate) fn before_filled(&self, rank: i32) -> Tally {
        Tally {
            items: 0,
            merges: rank,
            slots: rank * self.count,
        }
    }

    /// First item of a worker, `0 <= worker <= workers`. The last workers are those with one empty unit more
    /// than others, as they have no part where there are fewer parts than workers.
    pub(crate) fn first_item(&self, shape: &FmPlanShape, worker: i32) -> i32 {
        let each = self.empty / shape.workers;
        let fewer = shape.workers - self.empty % shape.workers; // workers that have no more than `each`
        worker.min(self.parts) + worker * each + (worker - fewer).max(0)
    }

    /// The item of part `part` of all, whose unit has `empty` empty ones before it.
    pub(crate) fn item_of_part(&self, shape: &FmPlanShape, part: i32, empty: i32) -> i32 {
        self.first_item(shape, part) + (empty + part) / shape.workers
    }

    /// The item of the empty unit that has `empty` others and `filled` units with tiles before it: in turn, from
    /// the last worker down.
    pub(crate) fn item_of_empty(&self, shape: &FmPlanShape, empty: i32, filled: i32) -> i32 {
        let worker = shape.workers - 1 - empty % shape.workers;
        let part_before = worker < filled * self.count;
        self.first_item(shape, worker) + i32::from(part_before) + empty / shape.workers
    }

    pub(crate) fn tally(&self) -> Tally {
        let cut = i32::from(self.count > 1);
        Tally {
            items: self.parts + self.empty,
            merges: cut * self.filled,
            slots: cut * self.parts,
        }
    }
}
