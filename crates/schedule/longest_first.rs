//! `FM_SPLIT_AUTO`: few units that would be cut at even shares are cut into parts no longer than such a share instead, which are dealt
//! out, the longest first, to the workers that have least so far (longest processing time first, Graham 1969). What is shorter than a
//! share stays whole, and what is longer has few parts, so that few workers have the end of one unit and the beginning of another.
//!
//! That goes in rounds: of the workers that have no more than the one with least will have, whoever has least gets the longest part that
//! is left, the next one the next, and so on. `kernels/plan/longest_first.h` and `longest_first.cuh` are the same for the device.

use std::cmp::Reverse;

use crate::algorithm::{Line, Parts, are_few, share_of_filled};
use crate::dealt::MOST_DEALT_WORKERS;
use crate::plan_layout::{FM_SPLIT_AUTO, FmPlanShape};

/// Being cut costs units of 16 rows little. Of more rows so many, of requests of as many query tokens each, are dealt out, ...
const ROWS_CUT_AT_EASE: i32 = 16;
const MOST_UNITS: i32 = 640;
/// ... if they are no more than so many to a worker.
const MOST_TO_A_WORKER: i32 = 5;
/// As many, and a part more for each worker but one.
const MOST_PARTS: usize = MOST_UNITS as usize + MOST_DEALT_WORKERS;
/// Longer shares and costs, in tiles, are left to the line: the device adds up what a worker has in 24 bits.
const MOST_TILES: i64 = 1 << 14;

/// Whether units, and requests, are so few that they may be dealt out if they are to be cut.
fn may_be_dealt_out(shape: &FmPlanShape, units: i32) -> bool {
    if shape.split_mode != FM_SPLIT_AUTO || shape.workers as usize > MOST_DEALT_WORKERS {
        return false;
    }
    if are_few(shape, 0) {
        return are_few(shape, units);
    }
    let most = MOST_UNITS.min(MOST_TO_A_WORKER * shape.workers);
    shape.ragged == 0 && shape.unit_rows > ROWS_CUT_AT_EASE && units <= most
}

/// Which worker has which part.
pub(crate) struct LongestFirst {
    /// Tiles of each part of a unit but its last, which has `least` tiles at least.
    pub(crate) step: i64,
    least: i64,
    /// Of each unit, its first part's number among all parts.
    first_part: [i32; MOST_UNITS as usize],
    /// Of each part, its worker and how many parts that has before it.
    place: [(i32, i32); MOST_PARTS],
    /// First item of each worker, and behind the last one.
    first_item: [i32; MOST_DEALT_WORKERS + 1],
    /// Whether no unit is cut.
    pub(crate) whole: bool,
}

impl LongestFirst {
    /// Deals out the units of a line of which `filled` have tiles; `None` where they do not share out so, or are too many. `common`: the
    /// length of their parts if they can all have such parts, one to a worker.
    pub(crate) fn new(
        shape: &FmPlanShape,
        line: &Line,
        filled: i32,
        common: Option<i64>,
    ) -> Option<Self> {
        if line.whole || !may_be_dealt_out(shape, line.units) {
            return None;
        }
        let [fixed, low] = [shape.fixed_cost, shape.min_part].map(i64::from);
        let share = share_of_filled(shape, line, filled);
        if share.max(fixed).max(low) > MOST_TILES {
            return None;
        }
        let mut way = Self {
            // Units that are cut cost more than once: about half of the parts are shorter.
            step: (share - fixed / 2).max(low),
            least: (fixed / 2 + 1).max(low),
            first_part: [0; MOST_UNITS as usize],
            place: [(0, 0); MOST_PARTS],
            first_item: [0; MOST_DEALT_WORKERS + 1],
            whole: true,
        };
        // Less than what cuts at even shares cost, and enough less than with parts of a common length, which nobody has two of.
        let most = match common {
            Some(length) => (length + fixed) * 7 / 8,
            None => {
                share + i64::from(shape.split_cost) - i64::from(shape.own_parts_gain) + fixed / 2
            }
        };
        let longest = way.deal_out(shape, line)?;
        (longest <= most).then_some(way)
    }

    /// Gives each part its place; returns the most that a worker has. `None` where parts are more than a plan has room for.
    fn deal_out(&mut self, shape: &FmPlanShape, line: &Line) -> Option<i64> {
        let workers = shape.workers as usize;
        let mut parts = [(Reverse(0), false, 0); MOST_PARTS]; // by tiles, then full ones, then by their order
        let mut count = 0;
        for unit in 0..line.units {
            let of_unit = self.parts(line.tiles(shape, unit));
            self.first_part[unit as usize] = count as i32;
            self.whole &= of_unit.count == 1;
            let more = count as i32 - unit + of_unit.count - 1;
            if more >= shape.workers {
                return None;
            }
            for j in 0..of_unit.count {
                let tiles = of_unit.tile(j + 1) - of_unit.tile(j);
                parts[count] = (Reverse(tiles), j + 1 == of_unit.count, count);
                count += 1;
            }
        }
        let parts = &mut parts[..count];
        parts.sort_unstable();
        let (mut loads, mut counts) = ([0; MOST_DEALT_WORKERS], [0; MOST_DEALT_WORKERS]);
        let mut turns: [usize; MOST_DEALT_WORKERS] = std::array::from_fn(|worker| worker);
        let turns = &mut turns[..workers];
        let cost = |tiles: i32| i64::from(tiles) + i64::from(shape.fixed_cost);
        let mut left = &*parts;
        while let Some(&(Reverse(longest), ..)) = left.first() {
            turns.sort_unstable_by_key(|&worker| (loads[worker], worker));
            let most = loads[turns[0]] + cost(longest);
            let takers = turns.partition_point(|&worker| loads[worker] <= most);
            let (round, rest) = left.split_at(takers.min(left.len()));
            for (&(Reverse(tiles), _, part), &worker) in round.iter().zip(turns.iter()) {
                self.place[part] = (worker as i32, counts[worker]);
                loads[worker] += cost(tiles);
                counts[worker] += 1;
            }
            left = rest;
        }
        let mut begin = 0;
        for (next, has) in self.first_item[1..].iter_mut().zip(&counts[..workers]) {
            begin += has;
            *next = begin;
        }
        loads.into_iter().max()
    }

    /// The parts of a unit.
    pub(crate) fn parts(&self, tiles: i32) -> Parts {
        let beyond = i64::from(tiles) - self.least;
        if beyond < self.step {
            return Parts::whole(tiles);
        }
        Parts::new(self.step, (beyond / self.step) as i32 + 1, tiles)
    }

    /// The item of part `j` of a unit.
    pub(crate) fn item(&self, unit: i32, j: i32) -> i32 {
        let (worker, place) = self.place[(self.first_part[unit as usize] + j) as usize];
        self.first_item(worker) + place
    }

    /// First item of a worker, `0 <= worker <= workers`. Its items are in the order in which they were dealt.
    pub(crate) fn first_item(&self, worker: i32) -> i32 {
        self.first_item[worker as usize]
    }
}
