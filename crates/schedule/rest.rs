//! `FM_SPLIT_REST`: lists that are equal, since no lengths are given, and more than workers: each worker has as many whole ones,
//! and those that are left are cut into parts, one to a worker, if that takes less time than one of them does.
//! `kernels/plan/rest.h` is the same for the device.

use crate::algorithm::Parts;
use crate::layout::DivCeil;
use crate::plan_layout::{FM_TILE_TOKENS, FmPlanShape};

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
    step: i32,
    /// Of a unit.
    tiles: i32,
}

impl Rest {
    /// `None` where no unit is cut. `keys`: of each of them.
    pub(crate) fn of(shape: &FmPlanShape, units: i32, keys: i64) -> Option<Self> {
        let tiles = keys.div_ceil_positive(FM_TILE_TOKENS) as i32;
        let (each, left) = (units / shape.workers, units % shape.workers);
        if each == 0 || each > MOST_WHOLE_BEFORE_REST || left == 0 || tiles == 0 {
            return None;
        }
        let most = (shape.workers / left).min(tiles / shape.min_part);
        if most < 2 {
            return None;
        }
        let step = (tiles + most - 1) / most;
        let pays = i64::from(step) + i64::from(shape.split_cost) < i64::from(tiles);
        pays.then_some(Self {
            each,
            units: left,
            count: (tiles + step - 1) / step,
            step,
            tiles,
        })
    }

    /// Parts of all units that are cut.
    pub(crate) fn cut(&self) -> i32 {
        self.units * self.count
    }

    /// Of a unit, of so many.
    pub(crate) fn parts(&self, unit: i32, units: i32) -> Parts {
        if unit < units - self.units {
            Parts::whole(self.tiles)
        } else {
            Parts::new(self.step.into(), self.count, self.tiles)
        }
    }

    /// The first item of a worker. After the last one: how many items there are.
    pub(crate) fn first_item(&self, worker: i32) -> i32 {
        worker * self.each + worker.min(self.cut())
    }

    /// Of a unit of a worker's whole ones.
    pub(crate) fn item_of_whole(&self, unit: i32) -> i32 {
        self.first_item(unit / self.each) + unit % self.each
    }

    /// Of a part of those that are cut, in their order: the last of its worker.
    pub(crate) fn item_of_part(&self, part: i32) -> i32 {
        self.first_item(part) + self.each
    }
}
