//! How long a launch takes, layout by layout, for the kinds of keys of which it has been measured: the layout that takes least is
//! chosen.
//!
//! A launch takes what it takes to begin and to end, more where parts are added up, and so much for each tile of the CTA
//! that has most; a tile takes longer the more CTAs are at work. It was fitted to thousands of plans on an H200, each shape with each layout
//! (`docs/tried-equal-units.md`, "Times of layouts", "of pages", "of lists" and "of pages of codes"): the root mean square error is 3 to 10 % for
//! layouts that are nearly the best. Some numbers have been moved since, until choices were best.

use super::{
    COSTS_OF_FEW_ROWS, Choice, Costs, Keys, MAX_CLUSTER, Problem, Queries, SMS_OF_SPEEDS, Split,
    Work, speed_of,
};
use crate::equal_parts::{Division, division};
use crate::layout::{DivCeil, usual_units};
use crate::plan_layout::FM_TILE_ROWS;

/// Times in hundredths of a microsecond.
pub(super) type Time = i64;

/// Of CTAs with so many query rows.
pub(super) struct Times {
    /// From begin to end but for the tiles, of whole units by 1, 2, 4, 8 or 16 CTAs each.
    whole: [Time; 5],
    /// What is added where units are cut in two, ...
    two_parts: Time,
    /// ... or into more equal parts, ...
    parts: Time,
    /// ... what more where all multiprocessors have one, ...
    parts_crowd: Time,
    /// ... and for each of a unit's above [`CHEAP_PARTS`] there, ...
    part: Time,
    /// ... or where the even shares fall.
    shares: Time,
    /// Of each tile, ...
    tile: Time,
    /// ... what is added where all multiprocessors are at work, ...
    crowd: Time,
    /// ... and what reading it takes then, with [`MEMORY_OF_SPEEDS`] and [`SMS_OF_SPEEDS`].
    read: Time,
}

const CHEAP_PARTS: i32 = 8;
/// What is added for more than two parts whose number is no power of two.
const UNEVEN_PARTS: Time = 40;
const NONE: Time = 1 << 40;
/// Tiles above it count as this many: so no product passes 63 bits.
const LONGEST: i64 = 1 << 36;

/// With 16, 32 and 64 rows.
pub(super) type TimesOfRows = [Times; 3];

const fn times(
    whole: [Time; 5],
    [two_parts, parts, parts_crowd, part, shares]: [Time; 5],
    [tile, crowd, read]: [Time; 3],
) -> Times {
    Times {
        whole,
        two_parts,
        parts,
        parts_crowd,
        part,
        shares,
        tile,
        crowd,
        read,
    }
}

/// Of pages of 16-bit numbers.
#[rustfmt::skip]
const PAGES: TimesOfRows = [
    times([393, 474, 547, 606, 567], [340, 190, 165, 3, 25], [100, 41, 207]),
    times([583, NONE, NONE, NONE, NONE], [491, 250, 215, 4, 984], [135, 24, 206]),
    times([777, NONE, NONE, NONE, NONE], [401, 200, 160, 12, 1038], [95, 70, 220]),
];
/// Of pages of codes.
#[rustfmt::skip]
const PAGES_OF_CODES: TimesOfRows = [
    times([518, 649, 613, 659, 684], [324, 233, 144, 2, 735], [86, 15, 115]),
    times([707, 1008, 938, 1010, 1129], [529, 372, 193, 2, 871], [88, 23, 116]),
    times([730, NONE, NONE, NONE, NONE], [638, 426, 205, 7, 1661], [145, 26, 72]),
];
/// Of pages of codes with scales.
#[rustfmt::skip]
const PAGES_OF_SCALED_CODES: TimesOfRows = [
    times([537, 637, 632, 677, 809], [288, 281, 64, 3, 638], [77, 40, 130]),
    times([575, 859, 884, 978, 1181], [494, 437, 188, 0, 818], [106, 39, 139]),
    times([768, NONE, NONE, NONE, NONE], [580, 400, 76, 10, 1836], [146, 48, 42]),
];
/// Of codes in a list.
#[rustfmt::skip]
const LISTED_CODES: TimesOfRows = [
    times([510, 548, 588, 624, 700], [222, 265, 12, 4, 485], [61, 57, 129]),
    times([604, 799, 819, 830, 1053], [384, 570, 10, 6, 801], [101, 32, 141]),
    times([802, NONE, NONE, NONE, NONE], [517, 370, 2, 0, 1252], [126, 65, 151]),
];
/// Of codes with scales in a list.
#[rustfmt::skip]
const LISTED_SCALED_CODES: TimesOfRows = [
    times([620, 645, 689, 736, 816], [225, 200, 36, 3, 587], [68, 73, 162]),
    times([677, 841, 868, 984, 1167], [363, 352, 43, 2, 653], [83, 100, 143]),
    times([771, NONE, NONE, NONE, NONE], [585, 217, 240, 6, 1639], [147, 71, 113]),
];
/// Of codes in lists of two caches.
#[rustfmt::skip]
const TWICE_LISTED_CODES: TimesOfRows = [
    times([542, 591, 636, 678, 827], [206, 284, 81, 0, 763], [125, 49, 104]),
    times([568, 748, 811, 934, 1310], [402, 444, 128, 0, 1051], [160, 35, 101]),
    times([825, NONE, NONE, NONE, NONE], [498, 184, 168, 34, 1800], [161, 59, 122]),
];
/// Of rows of 16-bit numbers in pages of other sizes.
#[rustfmt::skip]
const PAGES_OF_ROWS: TimesOfRows = [
    times([604, 616, 721, 817, 839], [311, 333, 0, 2, 693], [108, 21, 157]),
    times([695, 963, 1001, 1129, 1374], [832, 522, 60, 2, 910], [109, 13, 153]),
    times([754, NONE, NONE, NONE, NONE], [434, 309, 60, 11, 1696], [84, 91, 220]),
];
/// Of rows of 16-bit numbers in a list.
#[rustfmt::skip]
const LISTED_ROWS: TimesOfRows = [
    times([577, 595, 604, 622, 644], [311, 243, 0, 0, 693], [109, 42, 230]),
    times([827, 888, 986, 1099, 1374], [352, 282, 30, 0, 910], [115, 31, 212]),
    times([847, NONE, NONE, NONE, NONE], [494, 264, 30, 13, 1696], [126, 67, 231]),
];

/// Bounds on lengths of sequences above which most are loose ones.
pub(super) const MOST_TOKENS: i32 = 8192;

/// Of few rows, in tiles: what multiprocessors do with keys takes time, too, not only that of memory.
const COSTS_OF_KEYS: Costs = Costs {
    split: 12,
    own_parts_gain: 7,
    part: 11,
    whole_speed: 308,
    equal_speed: 308,
    ..COSTS_OF_FEW_ROWS
};
/// What being cut costs lists of few rows, in tiles, whose lengths may differ when it is planned. The times are of [`COSTS_OF_KEYS`].
const SPLIT_COST_OF_LISTS: i32 = 8;
/// Tiles that take as long as what lies between two items, with 16 or 32 rows.
const FIXED_COST_OF_PAGES_OF_CODES: i32 = 6;
/// Where there are more units than multiprocessors.
const COSTS_OF_MANY_UNITS_OF_CODES: Costs = Costs {
    part: COSTS_OF_KEYS.part,
    whole_speed: 288,
    ..COSTS_OF_FEW_ROWS
};
const COSTS_OF_MANY_UNITS_OF_ROWS: Costs = Costs {
    part: COSTS_OF_KEYS.part,
    whole_speed: 324,
    ..COSTS_OF_FEW_ROWS
};

/// Of equal units: from 1,000 shapes on an H200 (`docs/tried-equal-units.md`).
struct Equal {
    /// [`Costs::equal_speed`] with 16 and 32 rows.
    speeds: [i32; 2],
    /// [`Costs::equal_split`].
    split: i32,
}
const EQUAL_PAGES: Equal = Equal {
    speeds: [384, 358],
    split: 4,
};
const EQUAL_PAGES_OF_CODES: Equal = Equal {
    speeds: [245, 220],
    split: 10,
};
const EQUAL_LISTS_OF_CODES: Equal = Equal {
    speeds: [218, 210],
    split: 6,
};
const EQUAL_ROWS: Equal = Equal {
    speeds: [336, 352],
    split: 5,
};
/// Lengths of sequences mostly differ, where a cluster takes what the longest takes it, and parts for single CTAs get shorter: what units take
/// of which each has so many tenths of the greatest length ...
const USUAL_LENGTH: i64 = 7;
/// ... counts for so many tenths (`docs/tried-equal-units.md`, "Times of pages"): of up to [`FEW_ROWS`] query rows over whole pages, over codes,
/// and of others.
const USUAL_WEIGHTS: [i64; 3] = [5, 6, 4];
const FEW_ROWS: i64 = 32;

/// Percent that smaller teams than usual take longer than [`Problem::time`] knows, which does not count how often a tile is read.
const MORE_IN_SMALLER_TEAMS: Time = 4;

impl Problem {
    /// The layout that takes least [`time`](Self::time), where times are known and the bound on lengths says something about them.
    pub(super) fn fastest(&self, sm_count: i32, clusters: [i32; 4]) -> Option<Choice> {
        if self.split != Split::Auto || self.lengths_may_differ() {
            return None;
        }
        let times = self.times()?;
        let mut least = None;
        for &rows in self.rows_to_time() {
            let work = self.work(rows);
            let sizes = clusters.into_iter().zip([2, 4, 8, 16]);
            let shared = sizes.filter_map(|(most, splits)| {
                self.in_clusters((rows, splits), most, work, sm_count)
            });
            for choice in std::iter::once(self.alone(rows, sm_count)).chain(shared) {
                let Some(time) = self.time(&choice, work.tiles, times, sm_count) else {
                    continue;
                };
                if least.is_none_or(|(known, _)| time < known) {
                    least = Some((time, choice));
                }
            }
        }
        let (time, choice) = least?;
        let choice = match choice.rows {
            FM_TILE_ROWS => self
                .in_smaller_teams(time, times, sm_count)
                .unwrap_or(choice),
            _ => choice,
        };
        // Clusters of 16 never have units that are cut.
        let costs_less =
            self.has_lists() && choice.rows < FM_TILE_ROWS && choice.splits <= MAX_CLUSTER;
        let split_cost = match costs_less {
            true => SPLIT_COST_OF_LISTS * choice.splits,
            false => choice.split_cost,
        };
        Some(Choice {
            split_cost,
            ..choice
        })
    }

    /// In smaller teams of CTAs of 64 rows, if there are few of these and it takes less than `time`.
    fn in_smaller_teams(&self, time: Time, times: &TimesOfRows, sm_count: i32) -> Option<Choice> {
        let tiles = self.work(FM_TILE_ROWS).tiles;
        let choices = self
            .smaller_teams(sm_count)
            .map(|team| self.in_teams(team, sm_count));
        let timed =
            choices.filter_map(|c| Some((self.time_in_teams(&c, tiles, times, sm_count)?, c)));
        let (least, choice) = timed.min_by_key(|&(least, _)| least)?;
        (least < time).then_some(choice)
    }

    /// [`Self::time`], and in smaller teams than usual what else they take.
    pub(super) fn time_in_teams(
        &self,
        choice: &Choice,
        tiles: i64,
        times: &TimesOfRows,
        sm_count: i32,
    ) -> Option<Time> {
        let time = self.time(choice, tiles, times, sm_count)?;
        let smaller = choice.rows == FM_TILE_ROWS && choice.team < self.team();
        let more = if smaller { MORE_IN_SMALLER_TEAMS } else { 0 };
        Some(time + time * more / 100)
    }

    /// What is known of its keys.
    pub(super) fn times(&self) -> Option<&'static TimesOfRows> {
        Some(match (self.keys, self.queries) {
            (Keys::Mixed, _) => return None,
            (Keys::Pages, _) => &PAGES,
            (Keys::Codes, Queries::Sparse { extra_topk: 0, .. }) => &LISTED_CODES,
            (Keys::ScaledCodes, Queries::Sparse { extra_topk: 0, .. }) => &LISTED_SCALED_CODES,
            (Keys::Codes | Keys::ScaledCodes, Queries::Sparse { .. }) => &TWICE_LISTED_CODES,
            (Keys::Codes, _) => &PAGES_OF_CODES,
            (Keys::ScaledCodes, _) => &PAGES_OF_SCALED_CODES,
            (Keys::Rows, Queries::Sparse { .. }) => &LISTED_ROWS,
            (Keys::Rows, _) => &PAGES_OF_ROWS,
        })
    }

    /// Query rows of a CTA that may take least time.
    pub(super) fn rows_to_time(&self) -> &'static [i32] {
        match self.mean_rows() {
            ..=16 => &[16],
            // Several CTAs of 32 rows take longer than of 16 or of 64, by 5 to 10 %, but for ragged requests, whose last one may be half empty.
            65.. if self.keys == Keys::Pages && !self.is_ragged() => &[FM_TILE_ROWS, 16],
            _ => &[FM_TILE_ROWS, 32, 16],
        }
    }

    /// In clusters of `splits` CTAs of so many rows, of which there are `most`, if each unit can have its own.
    fn in_clusters(
        &self,
        (rows, splits): (i32, i32),
        most: i32,
        work: Work,
        sm_count: i32,
    ) -> Option<Choice> {
        let fits = i64::from(splits) < 2 * work.tiles && work.units <= most.into();
        if rows == FM_TILE_ROWS || !fits {
            return None;
        }
        let costs = match self.keys {
            Keys::Pages => self.costs_of_few_rows(rows, work, sm_count),
            _ => COSTS_OF_KEYS,
        };
        let choice = Choice::new((rows, 1, splits), most, costs);
        let uncut = work.tiles + i64::from(choice.fixed_cost) <= i64::from(choice.split_cost);
        Some(choice.for_clusters(work, uncut))
    }

    /// What things cost CTAs of 16 or 32 rows.
    pub(super) fn costs_of_few_rows(&self, rows: i32, work: Work, sm_count: i32) -> Costs {
        let many = work.units > sm_count.into();
        let costs = match self.keys {
            Keys::Pages | Keys::Mixed => COSTS_OF_FEW_ROWS,
            Keys::Codes | Keys::ScaledCodes if many => COSTS_OF_MANY_UNITS_OF_CODES,
            Keys::Rows if many => COSTS_OF_MANY_UNITS_OF_ROWS,
            Keys::Codes | Keys::ScaledCodes if self.lengths_may_differ() => Costs {
                split: COSTS_OF_FEW_ROWS.split,
                own_parts_gain: 3,
                ..COSTS_OF_KEYS
            },
            Keys::Codes | Keys::ScaledCodes | Keys::Rows => COSTS_OF_KEYS,
        };
        let (equal_speed, equal_split) = self.costs_of_equal(rows, &costs);
        Costs {
            fixed: self.fixed_cost(FIXED_COST_OF_PAGES_OF_CODES, costs.fixed),
            whole_speed: speed_of(costs.whole_speed, sm_count, SMS_OF_SPEEDS),
            equal_speed: self.equal_speed(equal_speed, sm_count),
            equal_split,
            ..costs
        }
    }

    /// What CTAs of 16 or 32 rows gain by reading alone, and lose by being cut at even shares, where units are equal.
    fn costs_of_equal(&self, rows: i32, costs: &Costs) -> (i32, i32) {
        let lists = self.has_lists();
        let equal = match self.keys {
            Keys::Mixed => return (costs.equal_speed, costs.equal_split),
            Keys::Rows => EQUAL_ROWS,
            Keys::Pages => EQUAL_PAGES,
            Keys::Codes | Keys::ScaledCodes if lists => EQUAL_LISTS_OF_CODES,
            Keys::Codes | Keys::ScaledCodes => EQUAL_PAGES_OF_CODES,
        };
        (equal.speeds[(rows.ilog2() - 4) as usize], equal.split)
    }

    /// What a unit costs besides its tiles: over pages of codes `of_codes`, which take less time for a tile.
    pub(super) fn fixed_cost(&self, of_codes: i32, of_others: i32) -> i32 {
        match (self.keys, self.queries) {
            (_, Queries::Sparse { .. }) => of_others,
            (Keys::Codes | Keys::ScaledCodes, _) => of_codes,
            _ => of_others,
        }
    }

    /// Of units that have so many tiles, at most, and, if they are parts of sequences, of [`USUAL_LENGTH`] of these, weighed. None without units or
    /// tiles, or with too many units for a plan.
    pub(super) fn time(
        &self,
        choice: &Choice,
        tiles: i64,
        times: &TimesOfRows,
        sm_count: i32,
    ) -> Option<Time> {
        let shape = self.shape_of(choice);
        let units = i32::try_from(usual_units(&shape)).ok()?;
        if units == 0 || tiles == 0 {
            return None;
        }
        let of = |tiles| {
            let division = division(&shape, units, tiles);
            (
                division,
                self.time_of(choice, units, division, times, sm_count),
            )
        };
        let (division, longest) = of(tiles);
        let longest = longest?;
        // Whole ones take as long as the longest.
        let usual = match (division, self.queries) {
            (Division::Whole { .. }, _) | (_, Queries::Sparse { .. }) => longest,
            _ => of((tiles * USUAL_LENGTH).div_ceil_positive(10)).1?,
        };
        let [of_pages, of_codes, of_others] = USUAL_WEIGHTS;
        let weight = match self.keys {
            _ if self.mean_rows() > FEW_ROWS => of_others,
            Keys::Pages => of_pages,
            Keys::Codes | Keys::ScaledCodes => of_codes,
            Keys::Rows | Keys::Mixed => of_others,
        };
        Some((longest * (10 - weight) + usual * weight) / 10)
    }

    /// Of so many units that are shared out like this. None for clusters whose units are cut.
    fn time_of(
        &self,
        choice: &Choice,
        units: i32,
        division: Division,
        all: &TimesOfRows,
        sm_count: i32,
    ) -> Option<Time> {
        let times = &all[(choice.rows.ilog2() - 4) as usize];
        let (longest, workers) = match division {
            Division::Whole { longest } => (longest, units.into()),
            Division::Shares { .. } | Division::Parts { .. } if choice.splits > 1 => return None,
            Division::Shares { share } => {
                let tiles = share - i64::from(choice.fixed_cost);
                (tiles.max(1), choice.workers.into())
            }
            Division::Parts { step, count } => (step, i64::from(units) * i64::from(count)),
        };
        // CTAs of a team read the same keys at the same time, and so do all of a request that begin together.
        let together = match division {
            Division::Whole { .. } => units <= choice.workers,
            Division::Parts { .. } => true,
            Division::Shares { .. } => false,
        };
        let blocks = self.mean_rows().div_ceil_positive(choice.rows).max(1);
        let readers = match together {
            true => blocks,
            false => choice.team.into(),
        };
        // Those of a request that do not begin together read them all, which takes memory as long as with 64 rows, at least.
        let apart = blocks > 1 && readers == 1;
        let [.., of_64_rows] = all;
        let read = match apart {
            true => times.read.max(of_64_rows.read),
            false => times.read / readers,
        };
        let read = read * self.share_of_memory(sm_count) / 256;
        let (sm_count, ctas) = (i64::from(sm_count), choice.team * choice.splits);
        let busy = (workers * i64::from(ctas)).min(sm_count);
        let extra = match division {
            Division::Whole { .. } => 0,
            Division::Shares { .. } => times.shares,
            Division::Parts { count: 2, .. } => times.two_parts,
            Division::Parts { count, .. } => {
                let more = Time::from((count - CHEAP_PARTS).max(0));
                let uneven = if count.count_ones() == 1 {
                    0
                } else {
                    UNEVEN_PARTS
                };
                times.parts + (times.parts_crowd + times.part * more) * busy / sm_count + uneven
            }
        };
        let begin = times.whole[choice.splits.ilog2() as usize] + extra;
        let longest = longest.div_ceil_positive(choice.splits).min(LONGEST);
        let tile = times.tile * sm_count + times.crowd.max(read - times.tile) * busy;
        Some(begin + longest * tile / sm_count)
    }
}
