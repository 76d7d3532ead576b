//! Parts dealt to the workers by size, in rounds of one to each worker: the longest parts first, then the shortest, then
//! the longest of those left, and so on; of each round the longest part goes to whoever has least so far. With two rounds
//! the longest comes with the shortest. `kernels/plan/dealt.h` and `deal.cuh` are the same for the device.
//!
//! Parts whose number is fixed (`num_splits`, `batch_invariant`) are, unless they are more than workers and about equally long: then
//! they share out as well on a line, on which those of a unit lie together, so that they are not ready, and added up, all at once.
//! Whole units are, where they would be cut on the line and dealt out no worker has much more than an even share.

use std::cmp::Reverse;

use crate::algorithm::{Line, Parts, are_few, even_share, parts_of};
use crate::layout::DivCeil;
use crate::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_REST, FmPlanShape};

/// More units are laid on a line: shares are long then, compared with parts.
pub(crate) const MOST_DEALT_UNITS: usize = 512;
/// As are more parts of them, ...
const MOST_DEALT_PARTS: usize = 2048;
/// ... and those for more workers than any GPU has.
pub(crate) const MOST_DEALT_WORKERS: usize = 256;

/// So many parts, one item each, for so many workers.
pub(crate) struct Deal {
    items: i32,
    workers: i32,
    ranks: Ranks,
    /// Of parts by rank.
    worker_of: [i32; MOST_DEALT_PARTS],
    /// Of the workers.
    loads: [i64; MOST_DEALT_WORKERS],
}

impl Deal {
    /// Deals out the parts of a line, `items` of them.
    fn new(shape: &FmPlanShape, line: &Line, items: i32) -> Self {
        let mut deal = Self {
            items,
            workers: shape.workers,
            ranks: Ranks::of_line(shape, line),
            worker_of: [0; MOST_DEALT_PARTS],
            loads: [0; MOST_DEALT_WORKERS],
        };
        let mut cost_of = [0; MOST_DEALT_PARTS];
        for unit in 0..line.units {
            let parts = parts_of(shape, line, unit);
            for j in 0..parts.count {
                let tiles = parts.tile(j + 1) - parts.tile(j);
                cost_of[deal.ranks.of(unit, &parts, j) as usize] =
                    i64::from(tiles) + i64::from(shape.fixed_cost);
            }
        }
        deal.deal_out(&cost_of[..items as usize]);
        deal
    }

    fn deal_out(&mut self, cost_of: &[i64]) {
        let workers = self.workers as usize;
        let mut turns: [usize; MOST_DEALT_WORKERS] = std::array::from_fn(|worker| worker);
        let turns = &mut turns[..workers];
        let rounds = cost_of.len().div_ceil(workers);
        for step in 0..rounds {
            if step > 0 {
                turns.sort_unstable_by_key(|&worker| (self.loads[worker], Reverse(worker)));
            }
            let first = round_of_step(step, rounds) * workers;
            for (rank, &worker) in (first..cost_of.len()).zip(turns.iter()) {
                self.worker_of[rank] = worker as i32;
                self.loads[worker] += cost_of[rank];
            }
        }
    }

    /// First item of a worker, `0 <= worker <= workers`. Its items are in the order of their ranks. In the last round, the
    /// only short one, some have none: it is the second that is dealt, when the last worker has least, or the only one.
    pub(crate) fn first_item(&self, worker: i32) -> i32 {
        let (rounds, left) = (self.items / self.workers, self.items % self.workers);
        let extra = if rounds == 0 {
            worker.min(left)
        } else {
            (worker - (self.workers - left)).max(0)
        };
        worker * rounds + extra
    }

    /// The item of part `j` of a unit.
    pub(crate) fn item(&self, unit: i32, parts: &Parts, j: i32) -> i32 {
        let rank = self.ranks.of(unit, parts, j);
        self.first_item(self.worker_of[rank as usize]) + rank / self.workers
    }
}

/// The round that is dealt after `step` others: the first, the last, the second, the second to last, and so on.
fn round_of_step(step: usize, rounds: usize) -> usize {
    if step.is_multiple_of(2) {
        step / 2
    } else {
        rounds - 1 - step / 2
    }
}

/// Parts whose number is fixed, few and of few units, are dealt if they are no more than workers, or not about equally long.
pub(crate) fn deal_parts(shape: &FmPlanShape, line: &Line) -> Option<Deal> {
    let few =
        line.units as usize <= MOST_DEALT_UNITS && shape.workers as usize <= MOST_DEALT_WORKERS;
    if matches!(shape.split_mode, FM_SPLIT_AUTO | FM_SPLIT_REST) || !few {
        return None;
    }
    let (mut items, mut longest) = (0, 0);
    for unit in 0..line.units {
        let parts = parts_of(shape, line, unit);
        items += parts.count;
        longest = longest.max(parts.tile(1));
    }
    let dealt = items as usize <= MOST_DEALT_PARTS
        && !shares_out_on_a_line(longest, items, shape.workers, line.share);
    dealt.then(|| Deal::new(shape, line, items))
}

/// Whether parts, the longest of `longest` tiles, share out on a line: more parts than workers, of which as many to each make an
/// eighth more than an even share at most.
fn shares_out_on_a_line(longest: i32, items: i32, workers: i32, share: i64) -> bool {
    let most = i64::from(items).div_ceil_positive(workers);
    items > workers && most * i64::from(longest) * 8 <= share * 9
}

/// `FM_SPLIT_AUTO`: few units that are to be cut, and yet more than workers, are dealt whole if what each worker gets is as
/// good as an even share and what cutting costs. `line` is whole then.
pub(crate) fn deal_whole(shape: &FmPlanShape, line: &mut Line) -> Option<Deal> {
    let (units, workers) = (line.units, shape.workers);
    let few = workers < units && are_few(shape, units);
    if shape.split_mode != FM_SPLIT_AUTO || line.whole || !few {
        return None;
    }
    let whole = Line {
        whole: true,
        share: even_share(line.total, workers),
        ..*line
    };
    let deal = Deal::new(shape, &whole, units);
    let most = whole.share + i64::from(shape.split_cost);
    if deal.loads.iter().any(|&load| load > most) {
        return None;
    }
    *line = whole;
    Some(deal)
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
struct Ranks {
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
    fn of(&self, unit: i32, parts: &Parts, j: i32) -> i32 {
        let [first, last] = self.of_unit[unit as usize];
        if j + 1 == parts.count {
            last
        } else {
            first + j
        }
    }
}
