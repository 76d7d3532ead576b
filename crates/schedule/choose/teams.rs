//! How many CTAs of 64 query rows share a unit: a team, whose CTAs read the same tiles at the same time.

use super::{MAX_CLUSTER, Problem, Queries, Target};
use crate::layout::DivCeil;
use crate::plan_layout::FM_TILE_ROWS;

/// CTAs of a team where a unit of all rows would need more than [`MAX_CLUSTER`]: of these the first with which fewest have no rows.
const TEAMS_OF_MANY_ROWS: [i64; 4] = [4, 5, 6, 3];
/// CTAs of a team where requests have as many rows each, if that takes less time.
const SMALLER_TEAMS: [i32; 3] = [4, 2, 1];
/// Multiprocessors for each block of rows, at least, where teams may be smaller: with fewer, or whole units, reading each tile more often costs more.
const SMS_OF_A_BLOCK: i64 = 2;
/// CTAs of a team where ragged requests have so many blocks of rows, on average, over 16-bit numbers: also where units are cut all four are at the
/// same tiles, so that the L2 gives what memory would have to.
const TEAM_OF_LONG_CHUNKS: i32 = 4;
const BLOCKS_OF_LONG_CHUNKS: i64 = 64;
/// If the longest one has no more than so many times as many tokens as they have on average, or, where that is not known, all have so many blocks
/// for each request but one: else most may be decodes, for which four are too many.
const ALIKE: i64 = 4;
const BLOCKS_OF_CHUNKS: i64 = 128;
/// CTAs of a team where requests have different numbers of rows, more than a tile on average ...
const TEAM_OF_RAGGED_ROWS: i32 = 2;
/// ... unless they are known to have an odd number of blocks, less than this, ...
const EVEN_ENOUGH_BLOCKS: i64 = 16;
/// ... or have fewer than so many on average, if single CTAs can have all at a time (of more, pairs read less), ...
const MANY_ENOUGH_BLOCKS: i64 = 6;
/// ... or most of them may have one token, whose rows are one block: then the second CTA of a team would often have nothing to do. They
/// may if the blocks of all tokens but one of each request are no more than so many for each other request, ...
const BLOCKS_BESIDE_A_DECODE: i64 = 18;
/// ... and, but for codes, where teams gain next to nothing, if requests have more tokens than these on average: fewer are drafts to verify.
const MOST_DRAFTS: i64 = 6;
/// ... and if so many-th part of them can have one token beside the longest one, where that is known.
const FEWEST_DECODES: i64 = 4;
/// A request with more tokens than these is a chunk of prefill.
const MOST_DRAFTS_OF_A_REQUEST: i32 = 32;

impl Problem {
    /// CTAs of 64 rows that share a unit.
    pub(super) fn team(&self) -> i32 {
        let blocks = self.mean_rows().div_ceil_positive(FM_TILE_ROWS).max(1);
        let are_many = || self.blocks() >= BLOCKS_OF_CHUNKS * (i64::from(self.batch) - 1);
        match self.queries {
            Queries::Ragged { .. }
                if blocks == 1
                    || self.is_ragged_invariant()
                    || self.may_mix_decodes()
                    || self.lacks_blocks_for_pairs(blocks) =>
            {
                1
            }
            Queries::Ragged { .. }
                if blocks >= BLOCKS_OF_LONG_CHUNKS
                    && !self.has_codes()
                    && self.have_up_to(ALIKE).unwrap_or_else(are_many) =>
            {
                TEAM_OF_LONG_CHUNKS
            }
            Queries::Ragged { .. } => TEAM_OF_RAGGED_ROWS,
            _ if blocks <= MAX_CLUSTER.into() => blocks as i32,
            _ => {
                let ctas = |&team: &i64| blocks.div_ceil_positive(team) * team;
                TEAMS_OF_MANY_ROWS.into_iter().min_by_key(ctas).unwrap_or(1) as i32
            }
        }
    }

    /// CTAs of teams that are smaller than [`Self::team`]'s, where requests have few blocks: more parts of them may find place.
    pub(super) fn smaller_teams(&self, sm_count: i32) -> impl Iterator<Item = i32> {
        let few = self.blocks() * SMS_OF_A_BLOCK <= sm_count.into();
        let most = match self.queries {
            Queries::Uniform { .. } if few => self.team(),
            _ => 0,
        };
        SMALLER_TEAMS.into_iter().filter(move |&team| team < most)
    }

    /// Whether ragged requests of so many blocks on average leave the second CTA of too many pairs without one.
    fn lacks_blocks_for_pairs(&self, blocks: i64) -> bool {
        let Target::Gpu { sm_count, .. } = self.target else {
            return false;
        };
        if self.group % (2 * FM_TILE_ROWS) == 0 {
            false
        } else if self.batch == 1 || self.have_up_to(1) == Some(true) {
            blocks % 2 == 1 && blocks < EVEN_ENOUGH_BLOCKS
        } else {
            let at_a_time = self.blocks() <= sm_count.into();
            blocks < MANY_ENOUGH_BLOCKS && at_a_time
        }
    }

    /// Whether the longest of the ragged requests has no more than so many times as many tokens as they have on average, where that is known.
    fn have_up_to(&self, times: i64) -> Option<bool> {
        match self.queries {
            Queries::Ragged { tokens, most } => most
                .map(|most| i64::from(most) * i64::from(self.batch) <= times * i64::from(tokens)),
            _ => None,
        }
    }

    /// Whether most of the requests may have one token beside few with many: ragged ones, with more than a tile of rows on average.
    pub(super) fn may_mix_decodes(&self) -> bool {
        let Queries::Ragged { tokens, most } = self.queries else {
            return false;
        };
        let (tokens, batch) = (i64::from(tokens), i64::from(self.batch));
        // With so many requests of more than one token.
        let mixes = |chunks: i64| {
            let others = (batch - chunks).max(0);
            let rows = (tokens - others) * i64::from(self.group);
            rows.div_ceil_positive(FM_TILE_ROWS) <= BLOCKS_BESIDE_A_DECODE * others
        };
        // Few tokens on average are drafts, unless there are chunks, as many of the longest one as there can be, beside which others
        // have one block on average.
        let beside_chunks = most.is_some_and(|most| {
            let chunks = (tokens / i64::from(most.max(1))).max(1);
            let others = (tokens - chunks * i64::from(most)).max(0) * i64::from(self.group);
            most > MOST_DRAFTS_OF_A_REQUEST
                && others <= i64::from(FM_TILE_ROWS) * (batch - chunks)
                && mixes(chunks)
        });
        let drafts = !self.has_chunks() && !beside_chunks;
        // As many as there can be, if no request has more tokens than the longest one.
        let decodes = most.map_or(batch, |most| {
            let most = i64::from(most).max(2);
            (batch * most - tokens) / (most - 1)
        });
        !self.split.is_invariant()
            && (self.has_codes() || decodes >= batch / FEWEST_DECODES)
            && self.mean_rows() > FM_TILE_ROWS.into()
            && self.group <= FM_TILE_ROWS
            && (self.has_codes() || !drafts)
            && mixes(1)
    }

    /// Whether ragged requests have more tokens on average than drafts have. Then some are chunks of prefill, whose plan is made when lengths
    /// are known: their bound is no loose one.
    pub(super) fn has_chunks(&self) -> bool {
        let batch = i64::from(self.batch);
        matches!(self.queries, Queries::Ragged { tokens, .. } if i64::from(tokens) > MOST_DRAFTS * batch)
    }
}
