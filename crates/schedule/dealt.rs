//! Parts dealt to the workers by size: the longest first, from the first worker to the last and back again, as long as
//! there are parts. `kernels/plan/dealt.h` is the same for the device.
//!
//! Parts whose number is fixed (`num_splits`, `batch_invariant`) are, unless they are about equally long: then they share
//! out as well on a line, on which those of a unit lie together, so that they are not ready, and added up, all at once.
//! Whole units are, where they would be cut on the line and dealt out no worker has much more than an even share.

use std::cmp::Reverse;

use crate::algorithm::{Line, Parts, even_share, parts_of};
use crate::layout::DivCeil;
use crate::plan_layout::{FM_SPLIT_AUTO, FmPlanShape};

/// More units are laid on a line: shares are long then, compared with parts.
const MOST_DEALT_UNITS: usize = 512;
/// The same of units that are dealt whole, with which the device takes its time.
const MOST_DEALT_WHOLE: i32 = 256;

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
    fn worker(&self, rank: i32) -> i32 {
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

/// Parts whose number is fixed, of few units, are dealt if they are not about equally long.
pub(crate) fn deal_parts(shape: &FmPlanShape, line: &Line) -> Option<(Deal, Ranks)> {
    if shape.split_mode == FM_SPLIT_AUTO || line.units as usize > MOST_DEALT_UNITS {
        return None;
    }
    let (mut items, mut longest) = (0, 0);
    for unit in 0..line.units {
        let parts = parts_of(shape, line, unit);
        items += parts.count;
        longest = longest.max(parts.tile(1));
    }
    let workers = shape.workers;
    (!shares_out_on_a_line(longest, items, workers, line.share))
        .then(|| (Deal { items, workers }, Ranks::of_line(shape, line)))
}

/// Whether parts, the longest of `longest` tiles, share out on a line: as many to each worker make an eighth more than
/// an even share at most.
fn shares_out_on_a_line(longest: i32, items: i32, workers: i32, share: i64) -> bool {
    let most = i64::from(items).div_ceil_positive(workers);
    most * i64::from(longest) * 8 <= share * 9
}

/// `FM_SPLIT_AUTO`: few units that are to be cut, and yet more than workers, are dealt whole if what each worker gets is as
/// good as an even share and what cutting costs. `line` is whole then.
pub(crate) fn deal_whole(shape: &FmPlanShape, line: &mut Line) -> Option<(Deal, Ranks)> {
    let (units, workers) = (line.units, shape.workers);
    let few = workers < units && units <= MOST_DEALT_WHOLE;
    if shape.split_mode != FM_SPLIT_AUTO || line.whole || !few {
        return None;
    }
    let whole = Line {
        whole: true,
        share: even_share(line.total, workers),
        ..*line
    };
    let deal = Deal {
        items: units,
        workers,
    };
    let ranks = Ranks::of_line(shape, &whole);
    let mut loads = [0; MOST_DEALT_WHOLE as usize];
    for unit in 0..units {
        let parts = parts_of(shape, &whole, unit);
        let worker = deal.worker(ranks.of(unit, &parts, 0));
        loads[worker as usize] += i64::from(parts.tile(1)) + i64::from(shape.fixed_cost);
    }
    let most = whole.share + i64::from(shape.split_cost);
    if loads.iter().any(|&load| load > most) {
        return None;
    }
    *line = whole;
    Some((deal, ranks))
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
    /// Of all parts of all units.
    fn of_line(shape: &FmPlanShape, line: &Line) -> Self {
        let mut ranks = Self::new();
        for unit in 0..line.units {
            ranks.push(unit, &parts_of(shape, line, unit));
        }
        ranks.sort();
        ranks
    }

    fn new() -> Self {
        Self {
            runs: [Run::default(); 2 * MOST_DEALT_UNITS],
            count: 0,
            of_unit: [[0; 2]; MOST_DEALT_UNITS],
        }
    }

    /// The parts of the next unit.
    fn push(&mut self, unit: i32, parts: &Parts) {
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
    fn sort(&mut self) {
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
