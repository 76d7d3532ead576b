//! How long a launch takes, layout by layout, for the kinds of keys of which it has been measured: the layout that takes least is
//! chosen.
//!
//! A launch takes what it takes to begin and to end, more where parts are added up, and so much for each tile of the CTA
//! that has most; a tile takes longer the more CTAs are at work. Of codes it was fitted to 1,859 plans on an H200: the root mean
//! square error of the fits is 3 to 6 %, 10 % of 64 rows over two lists (`docs/tried-equal-units.md`), of 16-bit numbers to 420 lists with
//! each layout each: 6 %. Some numbers have been moved since, until choices were best, and some units of 16-bit numbers have a rule
//! (`docs/tried-schedule.md`, "Few units, once more").

use super::{
    COSTS_OF_FEW_ROWS, Choice, Costs, Keys, MAX_CLUSTER, Problem, Queries, SMS_OF_SPEEDS, Split,
    Work, speed_of,
};
use crate::equal_parts::{Division, division};
use crate::layout::DivCeil;
use crate::plan_layout::FM_TILE_ROWS;

/// Times in hundredths of a microsecond.
type Time = i64;

/// Of CTAs with so many query rows.
struct Times {
    /// From begin to end but for the tiles, of whole units by 1, 2, 4, 8 or 16 CTAs each.
    whole: [Time; 5],
    /// What is added where units are cut in two, ...
    two_parts: Time,
    /// ... or into more equal parts, ...
    parts: Time,
    /// ... and for each of them above [`CHEAP_PARTS`], where all multiprocessors have one, ...
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
type TimesOfRows = [Times; 3];

const fn times(
    whole: [Time; 5],
    [two_parts, parts, part, shares]: [Time; 4],
    [tile, crowd, read]: [Time; 3],
) -> Times {
    Times {
        whole,
        two_parts,
        parts,
        part,
        shares,
        tile,
        crowd,
        read,
    }
}

/// Of pages of codes.
#[rustfmt::skip]
const PAGES_OF_CODES: TimesOfRows = [
    times([589, 711, 704, 798, 943], [292, 401, 5, 895], [93, 12, 105]),
    times([802, 971, 1015, 1161, 1269], [365, 475, 10, 1151], [107, 13, 110]),
    times([869, NONE, NONE, NONE, NONE], [556, 423, 10, 1582], [161, 22, 110]),
];
/// Of codes in a list.
#[rustfmt::skip]
const LISTED_CODES: TimesOfRows = [
    times([599, 698, 747, 819, 886], [307, 388, 5, 682], [141, 18, 125]),
    times([665, 849, 980, 1074, 1222], [395, 560, 5, 787], [171, 22, 125]),
    times([738, NONE, NONE, NONE, NONE], [609, 484, 10, 1252], [203, 33, 125]),
];
/// Of codes in lists of two caches.
#[rustfmt::skip]
const TWICE_LISTED_CODES: TimesOfRows = [
    times([731, 789, 766, 831, 905], [109, 267, 5, 970], [154, 29, 110]),
    times([869, 1053, 1035, 1110, 1276], [202, 470, 10, 1586], [165, 38, 110]),
    times([1050, NONE, NONE, NONE, NONE], [466, 460, 10, 2487], [179, 46, 110]),
];
/// Of rows of 16-bit numbers.
#[rustfmt::skip]
const ROWS: TimesOfRows = [
    times([607, 775, 676, 742, 854], [311, 333, 0, 693], [121, 30, 200]),
    times([932, 1158, 1181, 1264, 1374], [352, 342, 0, 910], [127, 43, 212]),
    times([907, NONE, NONE, NONE, NONE], [494, 294, 13, 1696], [132, 67, 246]),
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
/// Tiles of a unit from which on a sequence of codes gets no cluster of two or of four CTAs: if lengths are equal parts take 2 to 5 % longer, if
/// they differ, as they mostly do, up to 20 % less.
const LONG_FOR_PAIRS: i64 = 32;
const LONG_FOR_FOURS: i64 = 64;

impl Work {
    /// In clusters of `splits` CTAs of so many rows, of which there are `most`, if each unit can have its own.
    fn in_clusters(self, rows: i32, splits: i32, most: i32) -> Option<Choice> {
        let choice = Choice::new((rows, 1, splits), most, COSTS_OF_KEYS);
        let cutting_costs_more =
            self.tiles + i64::from(choice.fixed_cost) <= i64::from(choice.split_cost);
        let fits = rows < FM_TILE_ROWS
            && i64::from(splits) < 2 * self.tiles
            && self.units <= most.into()
            && (splits <= MAX_CLUSTER || cutting_costs_more);
        fits.then(|| {
            if splits > MAX_CLUSTER {
                choice.never_cut(self)
            } else if cutting_costs_more {
                choice.with_worker_each(self)
            } else {
                choice
            }
        })
    }
}

impl Problem {
    /// The layout that takes least time for units of the greatest length, where times are known.
    pub(super) fn fastest(&self, sm_count: i32, clusters: [i32; 4]) -> Option<Choice> {
        let lists = matches!(self.queries, Queries::Sparse { .. });
        if self.split != Split::Auto || (!lists && self.max_seq_len > MOST_TOKENS) {
            return None;
        }
        let times = match (self.keys, self.queries) {
            (_, Queries::Ragged { .. }) | (Keys::Pages | Keys::Mixed, _) => return None,
            (Keys::Codes, Queries::Sparse { extra_topk: 0, .. }) => &LISTED_CODES,
            (Keys::Codes, Queries::Sparse { .. }) => &TWICE_LISTED_CODES,
            (Keys::Codes, _) => &PAGES_OF_CODES,
            (Keys::Rows, _) => &ROWS,
        };
        let few_rows = self.work(16);
        if self.keys == Keys::Rows
            && self.are_for_sixteen(16, few_rows)
            && let Some(choice) = few_rows.in_clusters(16, 16, clusters[3])
        {
            return Some(choice);
        }
        let rows: &[i32] = match self.mean_rows() {
            ..=16 => &[16],
            _ => &[FM_TILE_ROWS, 32, 16],
        };
        let mut least = None;
        for &rows in rows {
            let work = self.work(rows);
            let times = &times[(rows.ilog2() - 4) as usize];
            let too_small = match (lists || self.keys == Keys::Rows, work.tiles) {
                (true, _) | (_, ..LONG_FOR_PAIRS) => 0,
                (_, ..LONG_FOR_FOURS) => 1,
                _ => 2,
            };
            let sizes = clusters.into_iter().zip([2, 4, 8, 16]).skip(too_small);
            let shared = sizes.filter_map(|(most, splits)| work.in_clusters(rows, splits, most));
            for choice in std::iter::once(self.alone(rows, sm_count)).chain(shared) {
                let Some(time) = self.time(&choice, work, times, sm_count) else {
                    continue;
                };
                if least.is_none_or(|(known, _)| time < known) {
                    least = Some((time, choice));
                }
            }
        }
        let (_, choice) = least?;
        // Clusters of 16 never have units that are cut.
        let costs_less = lists && choice.rows < FM_TILE_ROWS && choice.splits <= MAX_CLUSTER;
        let split_cost = match costs_less {
            true => SPLIT_COST_OF_LISTS * choice.splits,
            false => choice.split_cost,
        };
        Some(Choice {
            split_cost,
            ..choice
        })
    }

    /// What things cost CTAs of 16 or 32 rows.
    pub(super) fn costs_of_few_rows(&self, rows: i32, sm_count: i32) -> Costs {
        let many = self.work(rows).units > sm_count.into();
        let costs = match self.keys {
            Keys::Pages | Keys::Mixed => COSTS_OF_FEW_ROWS,
            Keys::Codes if many => COSTS_OF_MANY_UNITS_OF_CODES,
            Keys::Rows if many => COSTS_OF_MANY_UNITS_OF_ROWS,
            Keys::Codes if self.lengths_may_differ() => Costs {
                split: COSTS_OF_FEW_ROWS.split,
                own_parts_gain: 3,
                ..COSTS_OF_KEYS
            },
            Keys::Codes | Keys::Rows => COSTS_OF_KEYS,
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
        let lists = matches!(self.queries, Queries::Sparse { .. });
        let equal = match self.keys {
            Keys::Mixed => return (costs.equal_speed, costs.equal_split),
            Keys::Rows => EQUAL_ROWS,
            Keys::Pages => EQUAL_PAGES,
            Keys::Codes if lists => EQUAL_LISTS_OF_CODES,
            Keys::Codes => EQUAL_PAGES_OF_CODES,
        };
        (equal.speeds[(rows.ilog2() - 4) as usize], equal.split)
    }

    /// What a unit costs besides its tiles: over pages of codes `of_codes`, which take less time for a tile.
    pub(super) fn fixed_cost(&self, of_codes: i32, of_others: i32) -> i32 {
        match (self.keys, self.queries) {
            (_, Queries::Sparse { .. }) => of_others,
            (Keys::Codes, _) => of_codes,
            _ => of_others,
        }
    }

    /// Of units of the greatest length. None without units or tiles, or with too many units for a plan.
    fn time(&self, choice: &Choice, work: Work, times: &Times, sm_count: i32) -> Option<Time> {
        let units = i32::try_from(work.units).ok()?;
        if units == 0 || work.tiles == 0 {
            return None;
        }
        let shape = self.shape_of(choice);
        let fixed = i64::from(shape.fixed_cost);
        let division = division(&shape, units, work.tiles);
        let (longest, workers) = match division {
            Division::Whole { longest } => (longest, units.into()),
            Division::Shares { .. } | Division::Parts { .. } if choice.splits > 1 => return None,
            Division::Shares { share } => ((share - fixed).max(1), choice.workers.into()),
            Division::Parts { step, count } => (step, i64::from(units) * i64::from(count)),
        };
        // CTAs of a team read the same keys at the same time, and so do all of a request that begin together.
        let together = match division {
            Division::Whole { .. } => units <= choice.workers,
            Division::Parts { .. } => true,
            Division::Shares { .. } => false,
        };
        let readers = match together {
            true => self.mean_rows().div_ceil_positive(choice.rows).max(1),
            false => choice.team.into(),
        };
        let read = times.read * self.share_of_memory(sm_count) / 256 / readers;
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
                times.parts + times.part * more * busy / sm_count + uneven
            }
        };
        let begin = times.whole[choice.splits.ilog2() as usize] + extra;
        let longest = longest.div_ceil_positive(choice.splits).min(LONGEST);
        let tile = times.tile * sm_count + times.crowd.max(read - times.tile) * busy;
        Some(begin + longest * tile / sm_count)
    }
}
