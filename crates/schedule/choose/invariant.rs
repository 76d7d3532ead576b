//! The layout with `batch_invariant`, which depends on the rows of a CTA and on what is read, and the parts of a request, which
//! depend on its own length besides. Whether these are cut into their steps, which makes no difference to results, the batch decides.

use super::{Choice, Problem};
use crate::layout::{most_units, slots_of_steps};
use crate::plan_layout::{
    FM_STEPS_ADDED, FM_STEPS_NONE, FM_STEPS_STORED, FM_TILE_ROWS, FmPlanShape,
};
use crate::problem::{Keys, Target};

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
    /// What becomes of the steps of parts, which those of 16-bit numbers have on a GPU: CTAs of few rows add them up in registers, those
    /// of 64 have none for that. Teams, whose products take the time, have none: steps would cost 128 requests of different lengths more
    /// than the 15 % that there are for it.
    fn steps(&self, rows: i32, team: i32) -> i32 {
        match (self.target, self.keys) {
            (Target::Cpu { .. }, _) => FM_STEPS_NONE,
            (_, Keys::Pages | Keys::Rows) if rows < FM_TILE_ROWS => FM_STEPS_ADDED,
            (_, Keys::Pages | Keys::Rows) if team == 1 && !self.is_ragged() => FM_STEPS_STORED,
            _ => FM_STEPS_NONE,
        }
    }

    /// Pairs of CTAs that share the tiles of a part, of few rows where parts have no steps: half the time where requests are few,
    /// up to a third more where many are short.
    pub(super) fn invariant_pairs(
        &self,
        rows: i32,
        sm_count: i32,
        clusters: [i32; 4],
    ) -> Option<Choice> {
        if self.steps(rows, 1) != FM_STEPS_NONE {
            return None;
        }
        let costs = self.costs_of_few_rows(rows, self.work(rows), sm_count);
        Some(Choice::new((rows, 1, 2), clusters[0], costs))
    }

    /// The shape of a choice, with what says how its units are cut.
    pub(super) fn cut_invariantly(&self, choice: &Choice, shape: FmPlanShape) -> FmPlanShape {
        let steps = self.steps(choice.rows, choice.team);
        let units = most_units(&shape).max(1);
        let few_parts = match (steps, (i128::from(choice.workers) / units) as i32) {
            (FM_STEPS_ADDED, parts @ 2..) => parts,
            (FM_STEPS_STORED, parts) => parts.max(1),
            _ => 0,
        };
        let num_splits = ROWS_OF_PARTS / choice.rows;
        let few_steps = match steps {
            FM_STEPS_STORED => slots_of_steps(shape.max_seq_len, num_splits),
            _ => STEPS_OF_PARTS[usize::from(choice.rows == 32)] * few_parts,
        };
        FmPlanShape {
            num_splits,
            part_tiles: match (choice.rows, choice.splits) {
                (FM_TILE_ROWS, _) => TILES_OF_MANY_ROWS,
                (_, 1) => TILES_OF_FEW_ROWS,
                _ if self.has_codes() => TILES_OF_PAIRS_OVER_CODES,
                _ => TILES_OF_PAIRS,
            },
            steps,
            few_steps,
            few_parts,
            ..shape
        }
    }
}
