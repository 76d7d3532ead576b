//! How many query rows a CTA takes, 16, 32 or 64, where the layout that takes least (`times.rs`) is not known.

use super::{Keys, Problem, Split, Work};
use crate::plan_layout::FM_TILE_ROWS;

/// Tiles of 16 rows per multiprocessor up to which blocks of 16 rows share out the work, however many rows there are: then
/// a call takes what it takes to begin and to end, which is less with fewer rows to a CTA.
const LITTLE_WORK: i32 = 2;

impl Problem {
    /// Query rows of a CTA: by times where the bound on lengths is loose (`loose.rs`), else as a request has, on average, or fewer where there is
    /// little work.
    pub(super) fn rows(&self, sm_count: i32) -> i32 {
        if let Some(rows) = self.rows_of_loose_bound(sm_count) {
            return rows;
        }
        match self.mean_rows() {
            _ if self.is_ragged_invariant() => FM_TILE_ROWS,
            _ if self.is_little_work(sm_count) => 16,
            ..=16 => 16,
            17..=32 if self.keys != Keys::Mixed => 32,
            _ => FM_TILE_ROWS,
        }
    }

    /// Whether blocks of 16 rows would have [`LITTLE_WORK`] at most, as far as is known before the lengths are.
    pub(super) fn is_little_work(&self, sm_count: i32) -> bool {
        if self.split != Split::Auto || self.is_ragged() {
            return false;
        }
        let Work { units, tiles } = self.work(16);
        units * i128::from(tiles) <= i128::from(LITTLE_WORK * sm_count)
    }
}
