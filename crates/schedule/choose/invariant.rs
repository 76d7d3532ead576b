//! The layout with `batch_invariant`, which depends on the rows of a CTA and on what is read, and the parts of a request, which
//! depend on its own length besides.

use super::{Choice, Problem};
use crate::plan_layout::{FM_SPLIT_INVARIANT, FM_TILE_ROWS};
use crate::problem::Keys;

/// Tiles of a part, at most: with fewer, parts share out better and one CTA has less to do where requests are few, but each costs what it
/// takes to store 512 numbers for each row and to add them up. Of up to 32 rows, of which single CTAs have a part, ...
const TILES_OF_FEW_ROWS: i32 = 48;
/// ... or pairs, over numbers of 16 bits ...
const TILES_OF_PAIRS: i32 = 64;
/// ... and over codes; ...
const TILES_OF_PAIRS_OVER_CODES: i32 = 96;
/// ... and of 64: shorter ones would cost batches of requests of as many tokens each more than the others gain.
const TILES_OF_MANY_ROWS: i32 = 64;
/// Rows of all parts of a unit together, at most: what partial results of long requests take, a unit 2 MB.
const ROWS_OF_PARTS: i32 = 1024;

impl Problem {
    /// Pairs of CTAs that share the tiles of a part, of few rows, where there are kernels of pairs: half the time where requests are few,
    /// up to a third more where many are short.
    pub(super) fn invariant_pairs(
        &self,
        rows: i32,
        sm_count: i32,
        clusters: [i32; 4],
    ) -> Option<Choice> {
        if rows == 32 && self.keys == Keys::Pages {
            return None;
        }
        let costs = self.costs_of_few_rows(rows, self.work(rows), sm_count);
        Some(Choice::new((rows, 1, 2), clusters[0], costs))
    }

    /// `split_mode`, `num_splits` and `part_tiles` of a plan.
    pub(super) fn invariant_parts(&self, choice: &Choice) -> (i32, i32, i32) {
        let tiles = match (choice.splits, choice.rows) {
            (1, FM_TILE_ROWS) => TILES_OF_MANY_ROWS,
            (1, _) => TILES_OF_FEW_ROWS,
            _ if self.has_codes() => TILES_OF_PAIRS_OVER_CODES,
            _ => TILES_OF_PAIRS,
        };
        (FM_SPLIT_INVARIANT, ROWS_OF_PARTS / choice.rows, tiles)
    }
}
