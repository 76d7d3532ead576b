//! The layout with `batch_invariant`, which depends on the rows of a CTA and on what is read, and the parts of a request, which
//! depend on its own length besides. Whether these are cut into their steps, which makes no difference to results, the batch decides.

use super::{Choice, Problem};
use crate::layout::most_units;
use crate::plan_layout::{FM_TILE_ROWS, FmPlanShape};
use crate::problem::Keys;

/// Tiles of a part, at most: with fewer, parts share out better and one CTA has less to do where requests are few, but each costs what it
/// takes to store 512 numbers for each row and to add them up. Of up to 32 rows, of which single CTAs have a part, ...
const TILES_OF_FEW_ROWS: i32 = 48;
/// ... or pairs, of codes, ...
const TILES_OF_PAIRS_OVER_CODES: i32 = 96;
/// ... and of caches of two kinds; ...
const TILES_OF_PAIRS: i32 = 64;
/// ... and of 64: shorter ones would cost batches of requests of as many tokens each more than the others gain.
const TILES_OF_MANY_ROWS: i32 = 64;
/// Rows of all parts of a unit together, at most: what partial results of long requests take, a unit 2 MB.
const ROWS_OF_PARTS: i32 = 1024;
/// Units are cut wherever steps end if no part has more of them than this, of 16 rows and of 32: to store each takes longer than to have
/// fewer parts.
const STEPS_OF_PARTS: [i32; 2] = [4, 3];

impl Problem {
    /// Whether parts have steps, which CTAs of few rows of 16-bit numbers add up in registers.
    fn has_steps(&self, rows: i32) -> bool {
        rows < FM_TILE_ROWS && matches!(self.keys, Keys::Pages | Keys::Rows)
    }

    /// Pairs of CTAs that share the tiles of a part, of few rows where parts have no steps: half the time where requests are few,
    /// up to a third more where many are short.
    pub(super) fn invariant_pairs(
        &self,
        rows: i32,
        sm_count: i32,
        clusters: [i32; 4],
    ) -> Option<Choice> {
        if self.has_steps(rows) {
            return None;
        }
        let costs = self.costs_of_few_rows(rows, self.work(rows), sm_count);
        Some(Choice::new((rows, 1, 2), clusters[0], costs))
    }

    /// The shape of a choice, with what says how its units are cut.
    pub(super) fn cut_invariantly(&self, choice: &Choice, shape: FmPlanShape) -> FmPlanShape {
        let units = most_units(&shape).max(1);
        let steps = self.has_steps(choice.rows);
        let few_parts = match i128::from(choice.workers) / units {
            parts @ 2.. if steps => parts as i32,
            _ => 0,
        };
        FmPlanShape {
            num_splits: ROWS_OF_PARTS / choice.rows,
            part_tiles: match (choice.rows, choice.splits) {
                (FM_TILE_ROWS, _) => TILES_OF_MANY_ROWS,
                (_, 1) => TILES_OF_FEW_ROWS,
                _ if self.has_codes() => TILES_OF_PAIRS_OVER_CODES,
                _ => TILES_OF_PAIRS,
            },
            steps: steps.into(),
            few_steps: STEPS_OF_PARTS[usize::from(choice.rows == 32)] * few_parts,
            few_parts,
            ..shape
        }
    }
}
