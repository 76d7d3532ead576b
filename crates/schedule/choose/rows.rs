//! How many query rows a CTA takes: 16, 32 or 64.

use super::{Keys, Problem, Queries, Split, Work};
use crate::layout::DivCeil;
use crate::plan_layout::{FM_TILE_ROWS, FM_TILE_TOKENS};

/// Tiles of 16 rows per multiprocessor up to which blocks of 16 rows share out the work, however many rows there are: then
/// a call takes what it takes to begin and to end, which is less with fewer rows to a CTA.
const LITTLE_WORK: i32 = 2;
/// The same of [`Keys::Pages`], where no multiprocessor has two units.
#[rustfmt::skip]
const LITTLE_WORK_OF_PAGES: [LittleWork; 7] = [
    LittleWork { blocks: 2, units: Units::Any, tiles: 16, work: 9 },
    LittleWork { blocks: 2, units: Units::Fours, tiles: i64::MAX, work: 8 },
    LittleWork { blocks: 2, units: Units::Pairs, tiles: 48, work: 24 },
    LittleWork { blocks: 4, units: Units::Any, tiles: 8, work: 8 },
    LittleWork { blocks: 4, units: Units::Fours, tiles: 48, work: 6 },
    LittleWork { blocks: 8, units: Units::Any, tiles: 8, work: 4 },
    LittleWork { blocks: 8, units: Units::Fours, tiles: 48, work: 4 },
];

/// Units of requests of up to so many blocks of 16 rows: how many, of how many tiles at most, and of how many per multiprocessor.
struct LittleWork {
    blocks: i64,
    units: Units,
    tiles: i64,
    work: i128,
}

/// Numbers of units.
enum Units {
    Any,
    /// No more than there are clusters of four.
    Fours,
    /// As many as there are clusters of two, or a sixteenth fewer.
    Pairs,
}

/// Requests of 17 to 32 rows, at most, of 16-bit numbers and of codes, for which blocks of 16 rows are faster where their lengths differ ...
const FEW_THAT_DIFFER: i64 = 8;
const FEW_THAT_DIFFER_OF_CODES: i64 = 4;
/// ... and none has more tokens than these: up to 4,096 they take a fifth less, at 8,192 a twentieth, of mean 32,768 a fifth more.
const MOST_TOKENS_OF_FEW: i32 = 32_768;
/// Units of 17 to 32 rows, in fifths of the multiprocessors, from which on CTAs of 64 rows are faster over pages, ...
const MANY_UNITS: i64 = 3;
/// ... if units have as many tiles at most.
const TILES_OF_MANY: i64 = 12;
/// Parts of a unit, if each multiprocessor has one, with which they are, too, as those of 64 rows are added up sooner: more than so
/// many, ...
const MANY_PARTS: i64 = 4;
/// ... and no more than so many.
const MOST_PARTS: i64 = 9;

impl Problem {
    /// Query rows of a CTA: as a request has, on average; fewer where there is little work, more where there are many short requests.
    pub(super) fn rows(&self, sm_count: i32, clusters: [i32; 4]) -> i32 {
        match self.mean_rows() {
            _ if self.is_ragged_invariant() => FM_TILE_ROWS,
            _ if self.is_for_blocks_of_16(sm_count, clusters) => 16,
            ..=16 => 16,
            17..=32 if self.keys != Keys::Mixed && !self.are_faster_by_64(sm_count) => 32,
            _ => FM_TILE_ROWS,
        }
    }

    /// Whether so many requests have so short sequences of pages, or so few are cut so often, that CTAs of 64 rows are faster than of 32.
    fn are_faster_by_64(&self, sm_count: i32) -> bool {
        let requests = i64::from(self.batch) * i64::from(self.kv_heads);
        let tiles = i64::from(self.max_seq_len).div_ceil_positive(FM_TILE_TOKENS);
        let sm_count = i64::from(sm_count);
        let many_short = 5 * requests >= MANY_UNITS * sm_count && tiles <= TILES_OF_MANY;
        let uniform = matches!(self.queries, Queries::Uniform { .. });
        let often_cut = MANY_PARTS * requests < sm_count && sm_count <= MOST_PARTS * requests;
        self.keys == Keys::Pages
            && self.split == Split::Auto
            && (many_short || uniform && often_cut)
    }

    /// Whether blocks of 16 rows are to share out what little work there is, as far as is known before the lengths are.
    fn is_for_blocks_of_16(&self, sm_count: i32, clusters: [i32; 4]) -> bool {
        if self.is_little_work(sm_count) || self.are_few_that_differ() {
            return true;
        }
        if self.keys != Keys::Pages
            || self.split != Split::Auto
            || matches!(self.queries, Queries::Ragged { .. })
        {
            return false;
        }
        let Work { units, tiles } = self.work(16);
        let blocks = self.mean_rows().div_ceil_positive(16);
        let (pairs, fours) = (i128::from(clusters[0]), i128::from(clusters[1]));
        let is_little = |most: &LittleWork| {
            let number = match most.units {
                Units::Any => true,
                Units::Fours => units <= fours,
                Units::Pairs => 16 * units >= 15 * pairs && units <= pairs,
            };
            let work = units * i128::from(tiles);
            blocks <= most.blocks
                && number
                && tiles <= most.tiles
                && work <= most.work * i128::from(sm_count)
        };
        units <= sm_count.into() && LITTLE_WORK_OF_PAGES.iter().any(is_little)
    }

    /// Whether there are few requests of up to two blocks of 16 rows, of lengths that differ but are not long.
    fn are_few_that_differ(&self) -> bool {
        let most = match self.keys {
            Keys::Pages | Keys::Rows => FEW_THAT_DIFFER,
            Keys::Codes => FEW_THAT_DIFFER_OF_CODES,
            Keys::Mixed => 0,
        };
        self.split == Split::Auto
            && matches!(self.queries, Queries::Uniform { .. })
            && self.lengths_may_differ()
            && self.max_seq_len <= MOST_TOKENS_OF_FEW
            && self.mean_rows() <= 32
            && i64::from(self.batch) * i64::from(self.kv_heads) <= most
    }

    /// Whether blocks of 16 rows would have [`LITTLE_WORK`] at most, as far as is known before the lengths are.
    pub(super) fn is_little_work(&self, sm_count: i32) -> bool {
        if self.split != Split::Auto || matches!(self.queries, Queries::Ragged { .. }) {
            return false;
        }
        let Work { units, tiles } = self.work(16);
        units * i128::from(tiles) <= i128::from(LITTLE_WORK * sm_count)
    }
}
