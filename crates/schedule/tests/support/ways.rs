//! Which way `FM_SPLIT_AUTO` cuts a batch, and what comes of it, told from the batch alone.

use std::cmp::Reverse;
use std::collections::VecDeque;

use ferromla_schedule::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_FIXED};
use ferromla_schedule::{PlanShape, WorkItem};

use super::line::{even_share, fair_stretch, longest_whole_stretch, unit_key};
use super::{Case, ExpectedUnit, Planned, expected_units, plan};

pub fn tiles(item: &WorkItem) -> i32 {
    item.tile_end - item.tile_begin
}

/// What each worker has.
pub fn hands(planned: &Planned) -> Vec<Vec<WorkItem>> {
    let plan = planned.view();
    (0..plan.workers())
        .map(|worker| plan.worker(worker).to_vec())
        .collect()
}

/// How units are shared out, unless those with tiles get equal parts: a plan shows that by itself.
pub enum Way {
    /// Whole, as they lie on the line.
    Whole,
    /// In parts no longer than this.
    CommonLength(i64),
    /// Whole, in rounds.
    DealtWhole(Vec<Vec<WorkItem>>),
    LongestFirst(LongestFirst),
    /// Cut where the even shares end.
    AtShares,
}

/// The way of a batch of `FM_SPLIT_AUTO`.
pub fn way_of(case: &Case) -> Way {
    assert_eq!(case.shape.split_mode, FM_SPLIT_AUTO);
    let units = expected_units(case);
    if longest_whole_stretch(case, &units) <= fair_stretch(case, &units) {
        return Way::Whole;
    }
    if units.len() > most_dealt_out(&case.shape) {
        return Way::AtShares;
    }
    let few = case.shape.batch <= 384;
    let common = few.then(|| common_length(case, &units)).flatten();
    if few
        && common.is_none()
        && let Some(hands) = dealt_whole(case, &units)
    {
        return Way::DealtWhole(hands);
    }
    if let Some(way) = LongestFirst::of(case, &units, common) {
        return Way::LongestFirst(way);
    }
    common.map_or(Way::AtShares, Way::CommonLength)
}

/// Most units that may be dealt out, longest first.
fn most_dealt_out(shape: &PlanShape) -> usize {
    let cut_at_ease = shape.ragged != 0 || shape.unit_rows <= 16;
    match (shape.batch > 384, cut_at_ease) {
        (false, _) => 384,
        (true, true) => 0,
        (true, false) => 640.min(5 * shape.workers as usize),
    }
}

/// Whether a plan deals out whole units and parts no longer than a share, the longest first, where that is the way.
pub fn is_dealt_longest_first(case: &Case, planned: &Planned) -> bool {
    case.shape.split_mode == FM_SPLIT_AUTO
        && planned.header.units as usize <= most_dealt_out(&case.shape)
        && matches!(way_of(case), Way::LongestFirst(way) if way.is_plan(planned))
}

fn filled(units: &[ExpectedUnit]) -> impl Iterator<Item = i64> {
    units
        .iter()
        .map(|unit| unit.tiles)
        .filter(|&tiles| tiles > 0)
}

/// An even share of the units that have tiles.
fn share_of_filled(case: &Case, units: &[ExpectedUnit]) -> i64 {
    let fixed = i64::from(case.shape.fixed_cost);
    let cost: i64 = filled(units).map(|tiles| tiles + fixed).sum();
    let workers = i64::from(case.shape.workers);
    ((cost + workers - 1) / workers).max(1)
}

/// The least length with which there are no more parts than workers, if a part of it is a fair one and not all units have as many tiles.
fn common_length(case: &Case, units: &[ExpectedUnit]) -> Option<i64> {
    let shape = &case.shape;
    let workers = i64::from(shape.workers);
    let filled: Vec<i64> = filled(units).collect();
    let differ = filled.iter().any(|&tiles| tiles != filled[0]);
    if !differ || 8 * filled.len() as i64 > 7 * workers || workers > 1024 {
        return None;
    }
    let low = i64::from(shape.min_part);
    let few_enough = |length: i64| {
        // More than 32 parts of a unit pay only if each is long.
        let long = |tiles: &i64| length >= 2 * low || *tiles <= 32 * length;
        let parts = |tiles: &i64| (tiles + length - 1) / length;
        filled.iter().all(long) && filled.iter().map(parts).sum::<i64>() <= workers
    };
    let speed = (i64::from(shape.whole_speed) + 256) / 2;
    let most = share_of_filled(case, units) * speed / 256 + i64::from(shape.split_cost)
        - i64::from(shape.fixed_cost);
    let (mut too_short, mut fits) = (low - 1, most + 1);
    while too_short + 1 < fits {
        let length = (too_short + fits) / 2;
        if few_enough(length) {
            fits = length;
        } else {
            too_short = length;
        }
    }
    (fits <= most).then_some(fits)
}

/// The hands of more units than workers dealt whole, if nobody has more than an even share and the cost of a split then.
fn dealt_whole(case: &Case, units: &[ExpectedUnit]) -> Option<Vec<Vec<WorkItem>>> {
    if units.len() <= case.shape.workers as usize {
        return None;
    }
    let mut whole = case.clone();
    (whole.shape.split_mode, whole.shape.num_splits) = (FM_SPLIT_FIXED, 1);
    let hands = dealt(&plan(&whole));
    let most = even_share(case, units).1 + i64::from(case.shape.split_cost);
    let fair = |hand: &Vec<WorkItem>| cost_of(case.shape.fixed_cost, hand) <= most;
    hands.iter().all(fair).then_some(hands)
}

/// What parts cost, the fixed cost of each included.
fn cost_of<'a>(fixed: i32, parts: impl IntoIterator<Item = &'a WorkItem>) -> i64 {
    let cost = |part| i64::from(tiles(part)) + i64::from(fixed);
    parts.into_iter().map(cost).sum()
}

/// All parts, and to whom they go: a round to everybody of the longest, then of the shortest, then of the longest of those left,
/// and so on, the longest of each to whoever has least, the last one of equals. In a hand parts lie by size.
pub fn dealt(planned: &Planned) -> Vec<Vec<WorkItem>> {
    let mut parts = planned.view().items().to_vec();
    parts.sort_by_key(|item| (-tiles(item), unit_key(item), item.tile_begin));
    let (workers, fixed) = (planned.shape.workers as usize, planned.shape.fixed_cost);
    let mut hands = vec![Vec::new(); workers];
    let load = |hand: &[(usize, WorkItem)]| cost_of(fixed, hand.iter().map(|(_, part)| part));
    let mut rounds: VecDeque<Vec<(usize, WorkItem)>> = parts
        .into_iter()
        .enumerate()
        .collect::<Vec<_>>()
        .chunks(workers)
        .map(<[_]>::to_vec)
        .collect();
    let mut turns: Vec<usize> = (0..workers).collect();
    let mut longest = true;
    while let Some(round) = if longest {
        rounds.pop_front()
    } else {
        rounds.pop_back()
    } {
        for (part, &worker) in round.into_iter().zip(&turns) {
            hands[worker].push(part);
        }
        turns.sort_by_key(|&worker| (load(&hands[worker]), Reverse(worker)));
        longest = !longest;
    }
    let by_size = |mut hand: Vec<(usize, WorkItem)>| {
        hand.sort_by_key(|&(rank, _)| rank);
        hand.into_iter().map(|(_, part)| part).collect()
    };
    hands.into_iter().map(by_size).collect()
}

/// A part of a unit: whose, and its first tile and the one behind its last.
pub type Part = ((i32, i32, i32), i64, i64);

/// Parts no longer than a share, dealt out the longest first.
pub struct LongestFirst {
    /// Tiles of a part, but for the last one of a unit.
    pub step: i64,
    pub is_cut: bool,
    /// The length of parts that all could have instead, one to a worker.
    pub common: Option<i64>,
    /// The most that a worker may have.
    pub most: i64,
    /// The parts of each worker, in order.
    pub hands: Vec<Vec<Part>>,
}

impl LongestFirst {
    /// `None` where units do not share out so.
    fn of(case: &Case, units: &[ExpectedUnit], common: Option<i64>) -> Option<Self> {
        let [fixed, low, workers, split_cost, own_parts_gain] = [
            case.shape.fixed_cost,
            case.shape.min_part,
            case.shape.workers,
            case.shape.split_cost,
            case.shape.own_parts_gain,
        ]
        .map(i64::from);
        let share = share_of_filled(case, units);
        if workers > 256 || [share, fixed, low].into_iter().any(|tiles| tiles > 1 << 14) {
            return None;
        }
        let step = low.max(share - fixed / 2);
        let least = low.max(fixed / 2 + 1);
        // The last part takes what would be shorter than `least`.
        let full = |tiles: i64| (tiles - least).max(0) / step;
        let added: i64 = units.iter().map(|unit| full(unit.tiles)).sum();
        if added > workers - 1 {
            return None;
        }
        let mut parts: Vec<Part> = Vec::new(); // all full ones, then the others
        let key = |unit: &ExpectedUnit| (unit.request, unit.kv_head, unit.row_begin);
        for unit in units {
            parts.extend((0..full(unit.tiles)).map(|j| (key(unit), j * step, (j + 1) * step)));
        }
        let last = |unit: &ExpectedUnit| (key(unit), full(unit.tiles) * step, unit.tiles);
        parts.extend(units.iter().map(last));
        parts.sort_by_key(|(_, begin, end)| begin - end);

        let hands = dealt_in_rounds(parts, workers as usize, fixed);
        let longest = hands.iter().map(|hand| cost_of_parts(fixed, hand)).max();
        let most = match common {
            Some(length) => 7 * (length + fixed) / 8,
            None => share + split_cost - own_parts_gain + fixed / 2,
        };
        (longest <= Some(most)).then_some(Self {
            step,
            is_cut: added > 0,
            common,
            most,
            hands,
        })
    }

    /// Whether a plan is this.
    pub fn is_plan(&self, planned: &Planned) -> bool {
        i64::from(planned.header.share) == self.step
            && (planned.header.whole == 0) == self.is_cut
            && places(planned) == self.hands
    }
}

pub fn cost_of_parts(fixed: i64, parts: &[Part]) -> i64 {
    parts
        .iter()
        .map(|(_, begin, end)| end - begin + fixed)
        .sum()
}

/// Parts from the longest on. In a round a part goes to each worker that has no more than whoever has least will have.
fn dealt_in_rounds(parts: Vec<Part>, workers: usize, fixed: i64) -> Vec<Vec<Part>> {
    let mut hands = vec![Vec::new(); workers];
    let mut left = VecDeque::from(parts);
    while let Some(&longest) = left.front() {
        let loads: Vec<i64> = hands
            .iter()
            .map(|hand| cost_of_parts(fixed, hand))
            .collect();
        let least = *loads.iter().min().expect("a worker");
        let most = least + cost_of_parts(fixed, &[longest]);
        let mut turns: Vec<usize> = (0..workers).filter(|&i| loads[i] <= most).collect();
        turns.sort_by_key(|&worker| loads[worker]); // of equals the first one
        for worker in turns {
            hands[worker].extend(left.pop_front());
        }
    }
    hands
}

/// The parts of each worker, in order.
pub fn places(planned: &Planned) -> Vec<Vec<Part>> {
    let part = |item: &WorkItem| (unit_key(item), item.tile_begin.into(), item.tile_end.into());
    let hands = hands(planned);
    hands
        .iter()
        .map(|hand| hand.iter().map(part).collect())
        .collect()
}
