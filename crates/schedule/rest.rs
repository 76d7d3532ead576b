//! Units that are equal and more than workers: each worker has as many whole ones, and those that are left are cut into parts, one to a
//! worker. So are lists of `FM_SPLIT_REST`, which are equal since no lengths are given, if a part takes less time than one of them, and
//! units of many rows that would be cut at even shares (`equal_parts.rs`). `kernels/plan/rest.h` is the same for the device.

use crate::algorithm::{Parts, even_share};
use crate::layout::DivCeil;
use crate::plan_layout::{FM_TILE_ROWS, FM_TILE_TOKENS, FmPlanShape};
use crate::turns::empty_before;

/// Whole units of a worker above which one more does not count.
const MOST_WHOLE_BEFORE_REST: i32 = 128;

#[derive(Clone, Copy)]
pub(crate) struct Rest {
    /// Whole units of a worker.
    each: i32,
    /// Units that are cut.
    pub(crate) units: i32,
    /// Parts of each of these.
    count: i32,
    /// Tiles of a part, but for the last.
    pub(crate) step: i32,
    /// Of a unit.
    pub(crate) tiles: i32,
    /// Units without tiles besides, which are dealt out in turn.
    empty: i32,
}

impl Rest {
    /// Of lists of so many keys. `None` where none is cut.
    pub(crate) fn of_lists(shape: &FmPlanShape, units: i32, keys: i64) -> Option<Self> {
        let tiles = keys.div_ceil_positive(FM_TILE_TOKENS) as i32;
        let rest = Self::of(shape, units, tiles)?;
        (i64::from(rest.step) + i64::from(shape.split_cost) < i64::from(tiles)).then_some(rest)
    }

    /// Of units of many rows, and `empty` others. `None` where that is no better than leaving them `whole`, if that is what else is
    /// done, or than cutting them at even shares.
    pub(crate) fn beside_whole(
        shape: &FmPlanShape,
        units: i32,
        tiles: i32,
        empty: i32,
        whole: bool,
    ) -> Option<Self> {
        if shape.unit_rows < FM_TILE_ROWS {
            return None;
        }
        let rest = Self::of(shape, units, tiles)?;
        let [fixed, split, gain] =
            [shape.fixed_cost, shape.split_cost, shape.own_parts_gain].map(i64::from);
        let cost = i64::from(tiles) + fixed;
        let last = i64::from(rest.step) + fixed;
        let pays = if whole {
            // The whole ones that are left would be at work alone: all that a worker gains by that counts.
            let speed = 2 * i64::from(shape.whole_speed) - 256;
            (last + i64::from(shape.equal_split_cost / 2)) * speed < cost * 256
        } else {
            let share = even_share(i64::from(units) * cost, shape.workers);
            i64::from(rest.each) * cost + last <= share + split - gain
        };
        pays.then_some(Self { empty, ..rest })
    }

    fn of(shape: &FmPlanShape, units: i32, tiles: i32) -> Option<Self> {
        let (each, left) = (units / shape.workers, units % shape.workers);
        if each == 0 || each > MOST_WHOLE_BEFORE_REST || left == 0 || tiles == 0 {
            return None;
        }
        let most = (shape.workers / left).min(tiles / shape.min_part);
        if most < 2 {
            return None;
        }
        let step = (tiles + most - 1) / most;
        Some(Self {
            each,
            units: left,
            count: (tiles - shape.min_part) / step + 1, // the last part is no shorter than min_part
            step,
            tiles,
            empty: 0,
        })
    }

    /// Parts of all units that are cut.
    pub(crate) fn cut(&self) -> i32 {
        self.units * self.count
    }

    /// Of the unit that has `rank` others with tiles before it.
    pub(crate) fn parts(&self, shape: &FmPlanShape, rank: i32) -> Parts {
        if rank < self.each * shape.workers {
            Parts::whole(self.tiles)
        } else {
            Parts::new(self.step.into(), self.count, self.tiles)
        }
    }

    /// The first item of a worker. After the last one: how many items there are.
    pub(crate) fn first_item(&self, shape: &FmPlanShape, worker: i32) -> i32 {
        worker * self.each + worker.min(self.cut()) + empty_before(shape, self.empty, worker)
    }

    /// Of a whole unit, by its rank.
    pub(crate) fn item_of_whole(&self, shape: &FmPlanShape, rank: i32) -> i32 {
        self.first_item(shape, rank / self.each) + rank % self.each
    }

    /// Of a part of those that are cut, in their order.
    pub(crate) fn item_of_part(&self, shape: &FmPlanShape, part: i32) -> i32 {
        self.first_item(shape, part) + self.each
    }

    /// Of an empty unit with so many before it, from the last worker down: behind what its worker has else.
    pub(crate) fn item_of_empty(&self, shape: &FmPlanShape, before: i32) -> i32 {
        let worker = shape.workers - 1 - before % shape.workers;
        let others = self.each + i32::from(worker < self.cut());
        self.first_item(shape, worker) + others + before / shape.workers
    }
}
