//! Parts of units taken in turn: each worker has one, or the next few whole units, and its turns of the empty units, so that
//! no worker has two more of these than another; an empty unit is an item that costs a worker little. A worker's items stand in
//! the order of their units. `kernels/plan/turns.h` is the same for the device.
//!
//! Where most workers have parts, those without are spread among them: with all of them at the end a launch reads up to a
//! tenth less in the same time, as the multiprocessors that have work are not spread evenly over the GPU then.

use crate::layout::DivCeil;
use crate::plan_layout::FmPlanShape;

/// Of so many empty units, those of the workers before `worker`: in turn, so that the last workers are those with one more than others.
pub(crate) fn empty_before(shape: &FmPlanShape, empty: i32, worker: i32) -> i32 {
    let each = empty / shape.workers;
    let fewer = shape.workers - empty % shape.workers; // workers that have no more than `each`
    worker * each + (worker - fewer).max(0)
}

#[derive(Clone, Copy)]
pub(crate) struct Turns {
    /// Of all units with tiles.
    pub(crate) parts: i32,
    /// Units that have none.
    pub(crate) empty: i32,
    /// Parts of a worker: 1, or more where units are whole.
    pub(crate) each: i32,
}

impl Turns {
    pub(crate) fn items(&self) -> i32 {
        self.parts + self.empty
    }

    /// Workers that have parts.
    fn busy(&self) -> i32 {
        (self.parts - 1) / self.each + 1
    }

    /// The workers that those are spread over: where few have parts, the first.
    fn spread(&self, shape: &FmPlanShape) -> i32 {
        match self.busy() > shape.workers / 2 {
            true => shape.workers,
            false => self.busy(),
        }
    }

    /// The worker that has the `k`-th turn of parts.
    fn worker_of(&self, shape: &FmPlanShape, k: i32) -> i32 {
        (i64::from(k) * i64::from(self.spread(shape)) / i64::from(self.busy())) as i32
    }

    /// Parts of the workers before `worker`.
    fn parts_before(&self, shape: &FmPlanShape, worker: i32) -> i32 {
        let busy =
            (i64::from(worker) * i64::from(self.busy())).div_ceil_positive(self.spread(shape));
        (busy * i64::from(self.each)).min(self.parts.into()) as i32
    }

    /// First item of a worker, `0 <= worker <= workers`.
    pub(crate) fn first_item(&self, shape: &FmPlanShape, worker: i32) -> i32 {
        self.parts_before(shape, worker) + empty_before(shape, self.empty, worker)
    }

    /// The item of part `part` of all, whose unit has `empty` empty ones before it.
    pub(crate) fn item_of_part(&self, shape: &FmPlanShape, part: i32, empty: i32) -> i32 {
        let worker = self.worker_of(shape, part / self.each);
        part + empty_before(shape, self.empty, worker) + (empty + worker) / shape.workers
    }

    /// The item of the empty unit that has `empty` others and `parts` parts before it: in turn, from the last worker down.
    pub(crate) fn item_of_empty(&self, shape: &FmPlanShape, empty: i32, parts: i32) -> i32 {
        let worker = shape.workers - 1 - empty % shape.workers;
        let parts = |worker: i32| self.parts_before(shape, worker).min(parts);
        let before = parts(worker + 1) - parts(worker);
        self.first_item(shape, worker) + before + empty / shape.workers
    }
}
