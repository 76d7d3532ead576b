//! How long a launch takes, layout by layout, for the kinds of keys of which it has been measured: the layout that takes least is
//! chosen.
//!
//! A launch takes what it takes to begin and to end, more where parts are added up, and so much for each tile of the CTA
//! that has most; a tile takes longer the more CTAs are at work. All of it was fitted to 1,500 shapes with 20 layouts each on
//! an H200; the root mean square error of the fits is 4 to 6 %. Those of 16 and 32 rows of 16-bit numbers are newer, of 260 lists: 8
//! and 6 %.

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
    /// ... and what is added where all multiprocessors are at work.
    crowd: Time,
}

const CHEAP_PARTS: i32 = 8;
const NONE: Time = 1 << 40;
/// Tiles above it count as this many: so no product passes 63 bits.
const LONGEST: i64 = 1 << 40;

/// With 16, 32 and 64 rows.
type TimesOfRows = [Times; 3];

const fn times(
    whole: [Time; 5],
    [two_parts, parts, part, shares]: [Time; 4],
    [tile, crowd]: [Time; 2],
) -> Times {
    Times {
        whole,
        two_parts,
        parts,
        part,
        shares,
        tile,
        crowd,
    }
}

/// Of pages of codes.
#[rustfmt::skip]
const PAGES_OF_CODES: TimesOfRows = [
    times([580, 746, 758, 820, 950], [330, 400, 5, 224], [105, 30]),
    times([650, 964, 1028, 1115, 1269], [450, 600, 10, 1098], [125, 30]),
    times([767, NONE, NONE, NONE, NONE], [740, 474, 10, 1537], [176, 33]),
];
/// Of codes in a list.
#[rustfmt::skip]
const LISTED_CODES: TimesOfRows = [
    times([552, 729, 752, 807, 887], [350, 393, 5, -411], [149, 26]),
    times([591, 893, 1010, 1080, 1222], [440, 580, 5, -276], [177, 31]),
    times([716, NONE, NONE, NONE, NONE], [620, 700, 10, 338], [208, 37]),
];
/// Of codes in lists of two caches.
#[rustfmt::skip]
const TWICE_LISTED_CODES: TimesOfRows = [
    times([804, 806, 784, 831, 905], [100, 273, 5, 1237], [160, 37]),
    times([894, 1033, 1047, 1096, 1276], [180, 488, 10, 1889], [171, 49]),
    times([1147, NONE, NONE, NONE, NONE], [420, 500, 10, 2487], [189, 61]),
];
/// Of rows of 16-bit numbers.
#[rustfmt::skip]
const ROWS: TimesOfRows = [
    times([501, 636, 640, 703, 838], [316, 432, 3, -556], [137, 27]),
    times([723, 986, 1060, 1197, 1374], [362, 481, 5, 84], [152, 44]),
    times([705, NONE, NONE, NONE, NONE], [582, 589, 0, -153], [155, 77]),
];

/// Bounds on lengths of sequences above which most are loose ones.
pub(super) const MOST_TOKENS: i32 = 8192;

/// Of few rows, in tiles: what multiprocessors do with keys takes time, too, not only that of memory.
const COSTS_OF_KEYS: Costs = Costs {
    split: 12,
    own_parts_gain: 7,
    part: 11,
    whole_speed: 308,
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

impl Work {
    /// In clusters of `splits` CTAs of so many rows, of which there are `most`, if each unit can have its own.
    fn in_clusters(self, rows: i32, splits: i32, most: i32) -> Option<Choice> {
        let choice = Choice::new((rows, 1, splits), most, COSTS_OF_KEYS);
        // A merge has words for the CTAs of smaller clusters only: units of these must never be cut.
        let never_cut = self.tiles + i64::from(choice.fixed_cost) <= i64::from(choice.split_cost);
        let fits = rows < FM_TILE_ROWS
            && i64::from(splits) < 2 * self.tiles
            && self.units <= most.into()
            && (splits <= MAX_CLUSTER || never_cut);
        fits.then_some(Choice {
            workers: if never_cut { self.units as i32 } else { most },
            ..choice
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
        let rows: &[i32] = match self.mean_rows() {
            ..=16 => &[16],
            _ => &[FM_TILE_ROWS, 32, 16],
        };
        let mut least = None;
        for &rows in rows {
            let work = self.work(rows);
            let times = &times[(rows.ilog2() - 4) as usize];
            let sizes = clusters.into_iter().zip([2, 4, 8, 16]);
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
        Costs {
            fixed: self.fixed_cost(FIXED_COST_OF_PAGES_OF_CODES, costs.fixed),
            whole_speed: speed_of(costs.whole_speed, sm_count, SMS_OF_SPEEDS),
            ..costs
        }
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
        let division = division(&self.shape_of(choice), units, work.tiles);
        let (longest, workers) = match division {
            Division::Whole { longest } => (longest, units.into()),
            Division::Shares { .. } if choice.splits > 1 => return None,
            Division::Shares { longest } => (longest, choice.workers.into()),
            Division::Parts { step, count } => (step, i64::from(units) * i64::from(count)),
        };
        let (sm_count, ctas) = (i64::from(sm_count), choice.team * choice.splits);
        let busy = (workers * i64::from(ctas)).min(sm_count);
        let extra = match division {
            Division::Whole { .. } => 0,
            Division::Shares { .. } => times.shares,
            Division::Parts { count: 2, .. } => times.two_parts,
            Division::Parts { count, .. } => {
                let more = Time::from((count - CHEAP_PARTS).max(0));
                times.parts + times.part * more * busy / sm_count
            }
        };
        let begin = times.whole[choice.splits.ilog2() as usize] + extra;
        let longest = longest.div_ceil_positive(choice.splits).min(LONGEST);
        let tile = times.tile * sm_count + times.crowd * busy;
        Some(begin + longest * tile / sm_count)
    }
}
