//! Parts dealt to the workers by size: the longest first, from the first worker to the last and back again, as long as
//! there are parts. `kernels/plan/dealt.h` is the same for the device.
//!
//! Parts whose number is fixed (`num_splits`, `batch_invariant`) are, unless they are about equally long: then they share
//! out as well on a line, on which those of a unit lie together, so that they are not ready, and added up, all at once.
//! Whole units are, where they would be cut on the line and dealt out no worker has much more than an even share.

use std::cmp::Reverse;

use crate::algorithm::Parts;
use crate::layout::DivCeil;
use crate::plan_layout::FmPlanShape;

/// More units are laid on a line: shares are long then, compared with parts.
pub(crate) const MOST_DEALT_UNITS: usize = 512;
/// The same of units that are dealt whole, with which the device takes its time.
pub(crate) const MOST_DEALT_WHOLE: i32 = 256;

/// Whether parts, the longest of `longest` tiles, share out on a line: as many to each worker make an eighth more than
/// an even share at most.
pub(crate) fn shares_out_on_a_line(longest: i32, items: i32, workers: i32, share: i64) -> bool {
    let most = i64::from(items).div_ceil_positive(workers);
    most * i64::from(longest) * 8 <= share * 9
}

/// So many items for so many workers.
#[derive(Clone, Copy)]
pub(crate) struct Deal {
    pub(crate) items: i32,
    pub(crate) workers: i32,
}

impl Deal {
    /// First item of a worker, `0 <= worker <= workers`. In the last round some have none: in even rounds, counted
    /// from 0, the last ones, in odd rounds the first.
    pub(crate) fn first_item(&self, worker: i32) -> i32 {
        let (rounds, left) = (self.items / self.workers, self.items % self.workers);
        let extra = if rounds % 2 == 0 {
            worker.min(left)
        } else {
            (worker - (self.workers - left)).max(0)
        };
        worker * rounds + extra
    }

    /// The worker that has the part that `rank` others come before.
    pub(crate) fn worker(&self, rank: i32) -> i32 {
        let (round, turn) = (rank / self.workers, rank % self.workers);
        if round % 2 == 0 {
            turn
        } else {
            self.workers - 1 - turn
        }
    }

    /// The item of that part.
    pub(crate) fn item(&self, rank: i32) -> i32 {
        self.first_item(self.worker(rank)) + rank / self.workers
    }
}

/// Whether units are so few, and yet more than workers, that they may be dealt whole.
pub(crate) fn may_be_dealt_whole(units: i32, workers: i32) -> bool {
    workers < units && units <= MOST_DEALT_WHOLE
}

/// What whole units may cost a worker to be as good as an even share and what cutting costs.
pub(crate) fn fair_load(shape: &FmPlanShape, share: i64) -> i64 {
    share + i64::from(shape.split_cost)
}

/// Parts of a unit that are equally long: all but its last one, or that.
#[derive(Clone, Copy, Default)]
struct Run {
    tiles: i32,
    unit: i32,
    is_last: bool,
    count: i32,
}

/// How many parts come before those of each unit: before its first, and before its last one. Longer ones do, and of
/// equally long ones those of units before it, or before it in the unit.
pub(crate) struct Ranks {
    runs: [Run; 2 * MOST_DEALT_UNITS],
    count: usize,
    of_unit: [[i32; 2]; MOST_DEALT_UNITS],
}

impl Ranks {
    pub(crate) fn new() -> Self {
        Self {
            runs: [Run::default(); 2 * MOST_DEALT_UNITS],
            count: 0,
            of_unit: [[0; 2]; MOST_DEALT_UNITS],
        }
    }

    /// The parts of the next unit.
    pub(crate) fn push(&mut self, unit: i32, parts: &Parts) {
        let last = parts.count - 1;
        for (is_last, first, count) in [(false, 0, last), (true, last, 1)] {
            self.runs[self.count] = Run {
                tiles: parts.tile(first + 1) - parts.tile(first),
                unit,
                is_last,
                count,
            };
            self.count += 1;
        }
    }

    /// When all units are there.
    pub(crate) fn sort(&mut self) {
        let runs = &mut self.runs[..self.count];
        runs.sort_unstable_by_key(|run| (Reverse(run.tiles), run.unit, run.is_last));
        let mut rank = 0;
        for run in runs {
            self.of_unit[run.unit as usize][usize::from(run.is_last)] = rank;
            rank += run.count;
        }
    }

    /// Of part `j`.
    pub(crate) fn of(&self, unit: i32, parts: &Parts, j: i32) -> i32 {
        let [first, last] = self.of_unit[unit as usize];
        if j + 1 == parts.count {
            last
        } else {
            first + j
        }
    }
}
