//! How many query rows a CTA takes where times (`times.rs`) are not known: 16, 32 or 64.

use super::{Keys, Problem, Queries, Split, Work};
use crate::plan_layout::FM_TILE_ROWS;

/// Tiles of 16 rows per multiprocessor up to which blocks of 16 rows share out the work, however many rows there are: then
/// a call takes what it takes to begin and to end, which is less with fewer rows to a CTA.
const LITTLE_WORK: i32 = 2;
/// Requests of 17 to 32 rows, at most, of 16-bit numbers and of codes, for which blocks of 16 rows are faster where their lengths differ ...
const FEW_THAT_DIFFER: i64 = 8;
const FEW_THAT_DIFFER_OF_CODES: i64 = 4;
/// ... and none has more tokens than these: up to 4,096 they take a fifth less, at 8,192 a twentieth, of mean 32,768 a fifth more.
const MOST_TOKENS_OF_FEW: i32 = 32_768;

impl Problem {
    /// Query rows of a CTA: as a request has, on average; fewer where there is little work.
    pub(super) fn rows(&self, sm_count: i32) -> i32 {
        match self.mean_rows() {
            _ if self.is_ragged_invariant() => FM_TILE_ROWS,
            _ if self.is_little_work(sm_count) || self.are_few_that_differ() => 16,
            ..=16 => 16,
            17..=32 if self.keys != Keys::Mixed => 32,
            _ => FM_TILE_ROWS,
        }
    }

    /// Whether there are few requests of up to two blocks of 16 rows, of lengths that differ but are not long.
    fn are_few_that_differ(&self) -> bool {
        let most = match self.keys {
            Keys::Pages | Keys::Rows => FEW_THAT_DIFFER,
            Keys::Codes | Keys::ScaledCodes => FEW_THAT_DIFFER_OF_CODES,
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
